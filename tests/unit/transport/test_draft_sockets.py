"""What travels over a socket of a drafting stream, and what a stranger may make of it."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvbraid.errors import DataLossError, InvalidRequestError
from kvbraid.speculative.proposal import DraftTask
from kvbraid.transport.draft_rows import FollowingRows, row_carrier
from kvbraid.transport.draft_step import fill_step, tasks_from_proto
from kvbraid.transport.draft_terms import (
    DraftTerms,
    LocalSocketOffer,
    SocketOffers,
    TcpOffer,
    offers_from_proto,
    terms_to_proto,
)
from kvbraid.transport.outgoing_bytes import OutgoingBytes
from kvbraid.transport.socket_frames import ReceivedFrames, frame_of
from kvbraid.transport.step_socket import MAX_RECORD_BYTES
from kvbraid.v1 import draft_pb2 as pb

TERMS = DraftTerms(
    epoch=1, drafter_kind="eagle3", drafter_digest="d", target_digest="t", hidden_size=3,
    row_dtype="bfloat16", tap_layers=(0, 5, 9), max_draft_tokens=7, predicts_from_anchor=False,
    vocab_size=100, draft_vocab_size=40, max_rows_per_message=64, max_sequences=4, max_position=99,
)  # fmt: skip
LOCAL, TCP = LocalSocketOffer("host", "kvbraid-draft-1", b"a" * 32), TcpOffer("host:1", b"b" * 32)


class Source:
    """A socket that gives `size` bytes at a time; room for a TLS record is always asked for."""

    def __init__(self, data: bytes, size: int) -> None:
        self.data, self.size = memoryview(data), size

    def recv_into(self, room: memoryview, /) -> int:
        assert len(room) >= MAX_RECORD_BYTES
        given, self.data = self.data[: self.size], self.data[self.size :]
        given, left = given[: len(room)], given[len(room) :]
        room[: len(given)] = given
        self.data = memoryview(bytes(left) + bytes(self.data)) if left else self.data
        return len(given)

    def fileno(self) -> int:
        return -1

    def sendmsg(self, pieces: Sequence[memoryview], /) -> int:
        raise NotImplementedError

    def shutdown(self, how: int, /) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("local", [LOCAL, None])
@pytest.mark.parametrize("tcp", [TCP, None])
def test_offers_round_trip(local: LocalSocketOffer | None, tcp: TcpOffer | None) -> None:
    message = terms_to_proto(TERMS)
    for offer in (local, tcp):
        if offer is not None:
            offer.write(message)
    parsed = pb.DraftTerms.FromString(message.SerializeToString())
    assert offers_from_proto(parsed) == SocketOffers(local, tcp)


@given(
    sent=st.lists(st.tuples(st.binary(max_size=10), st.binary(max_size=10)), max_size=5),
    size=st.integers(1, 30),
)
def test_frames_come_as_they_were_sent_however_they_are_cut(
    sent: list[tuple[bytes, bytes]], size: int
) -> None:
    assert received(ReceivedFrames(20), sent, size) == sent


@pytest.mark.parametrize("size", [100_000, 15_000])
def test_frames_larger_than_its_room_come_whole_and_leave_no_memory_behind(size: int) -> None:
    rng = random.Random(5)
    sizes = [(300_000, 0), (10, 0), (9, 5_000_000), (262_136, 0), (70_000, 1), (0, 0)]
    sent = [(rng.randbytes(message), rng.randbytes(rows)) for message, rows in sizes]
    frames = ReceivedFrames(5_000_009)
    assert received(frames, sent, size) == sent
    assert len(frames._memory) <= 1 << 20


def received(
    frames: ReceivedFrames, sent: list[tuple[bytes, bytes]], size: int
) -> list[tuple[bytes, bytes]]:
    """What comes of frames of `sent`, `size` bytes at a time."""
    stream = b"".join(frame_of(message, [memoryview(rows)]) + rows for message, rows in sent)
    source, found = Source(stream, size), list[tuple[bytes, bytes]]()
    while frames.receive(source):
        found += [(frame.message, bytes(frame.rows)) for frame in frames]
    return found


@pytest.mark.parametrize(("message", "rows"), [(21, 0), (0, 21), (2**32 - 1, 2**32 - 1)])
def test_a_frame_that_is_too_long_is_refused_before_it_is_there(message: int, rows: int) -> None:
    frames = ReceivedFrames(20)
    frames.receive(Source(frame_of(b"x" * 20) + struct.pack("<II", message, rows), 100))
    with pytest.raises(DataLossError, match=f"a frame of {message + rows} bytes, accepted: 20"):
        list(frames)


class Narrow(Source):
    """A socket with room for so many bytes between two refusals. sent: what it took."""

    def __init__(self, rooms: list[int]) -> None:
        super().__init__(b"", 1)
        self.rooms, self.sent = rooms, bytearray()

    def sendmsg(self, pieces: Sequence[memoryview], /) -> int:
        room = self.rooms.pop(0) if self.rooms else 1 << 20
        if not room:
            raise BlockingIOError
        data = b"".join(pieces)[:room]
        self.sent += data
        return len(data)


@given(
    pieces=st.lists(st.binary(max_size=9), max_size=6),
    rooms=st.lists(st.integers(0, 9), max_size=9),
)
def test_what_has_no_room_is_sent_later_and_in_order(pieces: list[bytes], rooms: list[int]) -> None:
    outgoing, socket = OutgoingBytes(), Narrow(rooms)
    outgoing.add(*pieces)
    while not outgoing.write(socket):
        outgoing.keep()
    assert bytes(socket.sent) == b"".join(pieces)
    assert not outgoing


def test_what_is_kept_is_no_longer_its_owners() -> None:
    owned = bytearray(b"abc")
    outgoing, socket = OutgoingBytes(), Narrow([1, 0])
    outgoing.add(memoryview(owned))
    assert not outgoing.write(socket)
    outgoing.keep()
    owned[:] = b"xyz"
    assert outgoing.write(socket)
    assert socket.sent == b"abc"


@pytest.mark.parametrize("num_rows", [2, 6000])
def test_rows_behind_their_message_are_those_of_the_tensors(num_rows: int) -> None:
    sender, receiver = FollowingRows(TERMS.row_format), FollowingRows(TERMS.row_format)
    rows = torch.arange(num_rows * 3).view(num_rows, 3).to(torch.bfloat16)
    turned = torch.zeros(3, 4).t()  # neither of the type nor contiguous
    message = pb.DraftRows()
    sender.pack([rows, turned, rows[:0]], message)
    assert bool(sender.to_follow) == (num_rows == 6000)
    receiver.followed = memoryview(b"".join(sender.to_follow))
    found = receiver.unpack(message, num_rows + 4)
    assert torch.equal(found, torch.cat([rows, turned.to(torch.bfloat16)]))
    with pytest.raises(InvalidRequestError, match="rows have"):
        receiver.unpack(message, num_rows)


def step_bytes() -> bytes:
    tasks = [
        DraftTask(key, 5, torch.ones(2, 3, dtype=torch.bfloat16), (7, 8), 8, 3) for key in "ab"
    ]
    request = pb.DraftRequest()
    carrier = row_carrier(TERMS.row_format)
    fill_step(request.step, tasks, ("c",), epoch=1, carrier=carrier)
    return request.SerializeToString()


STEP = step_bytes()


@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(STEP) - 1), st.integers(0, 255)), min_size=1, max_size=6
    ),
    cut=st.integers(0, 8),
)
def test_no_bytes_are_worse_than_refused(edits: list[tuple[int, int]], cut: int) -> None:
    """The thread that computes reads them: anything else would end it."""
    data = bytearray(STEP)
    for position, value in edits:
        data[position] = value
    try:
        request = pb.DraftRequest.FromString(bytes(data[: len(data) - cut]))
    except DecodeError:
        return
    carrier = row_carrier(TERMS.row_format)
    try:
        received = tasks_from_proto(request.step, TERMS, carrier, str)
    except InvalidRequestError:
        return
    assert len(received.tasks) <= TERMS.max_sequences
