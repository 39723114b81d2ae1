"""Steps over a socket beside gRPC: when it is taken, what it keeps of the stream, how it ends."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from kvbraid.speculative.proposal import Proposal
from kvbraid.transport.draft_connection import choose_draft_wires
from kvbraid.transport.draft_terms import LocalSocketOffer, SocketOffers, TcpOffer
from kvbraid.transport.socket_draft_stream import SocketDraftStream
from kvbraid.transport.socket_frames import frame_of
from kvbraid.v1 import draft_pb2 as pb

Code = grpc.StatusCode


@pytest.fixture(params=["local_socket", "tcp"])
def wire(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
async def raw(service: Any, draft: Any, wire: str) -> Any:
    stream = draft.raw_socket(service, wire)
    await stream.open()
    yield stream
    stream.socket.close()


def stream_of(target: Any) -> SocketDraftStream:
    stream = target.drafting._stream
    assert isinstance(stream, SocketDraftStream)
    return stream


async def ends_with(code: Code, words: str, stream: Any) -> None:
    """The call tells why; the socket just ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.call.read()
    assert caught.value.code() is code
    assert words in (caught.value.details() or "")
    assert await stream.read() is None


# Which wire.


LOCAL, TCP = LocalSocketOffer("here", "kvbraid-draft-1", b""), TcpOffer("host:1", b"")


@pytest.mark.parametrize(
    ("choice", "offers", "reach", "wires"),
    [
        ("auto", SocketOffers(LOCAL, TCP), "here", ["local_socket", "tcp"]),
        ("auto", SocketOffers(LOCAL, TCP), "elsewhere", ["tcp"]),
        ("auto", SocketOffers(LOCAL, None), "elsewhere", []),
        ("auto", SocketOffers(None, TCP), "here", ["tcp"]),
        ("auto", SocketOffers(LocalSocketOffer("", "x", b""), None), "", []),
        ("grpc", SocketOffers(LOCAL, TCP), "here", []),
        ("tcp", SocketOffers(LOCAL, TCP), "here", ["tcp"]),
        ("tcp", SocketOffers(LOCAL, None), "here", ["tcp"]),
        ("local_socket", SocketOffers(LOCAL, TCP), "elsewhere", ["local_socket"]),
    ],
)
def test_auto_takes_the_fastest_that_reaches(
    choice: Any, offers: SocketOffers, reach: str, wires: list[str]
) -> None:
    assert choose_draft_wires(choice, offers, reach) == wires


async def test_auto_finds_the_socket_of_its_host_then_tcp_then_grpc(
    service: Any, draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def taken() -> str:
        async with draft.target(service.address, wire="auto") as target:
            await target.connected()
            assert isinstance((await target.step(draft.task("a", 0, [1])))[0], Proposal)
            return str(target.drafting._stream.wire)

    assert await taken() == "local_socket"
    monkeypatch.setattr("kvbraid.transport.draft_connection.socket_reach", lambda: "another host")
    assert await taken() == "tcp"
    service.listeners["tcp"].close()
    assert await taken() == "grpc"


async def test_a_socket_that_is_asked_for_is_not_replaced(
    wire: str, service: Any, draft: Any, caplog: pytest.LogCaptureFixture
) -> None:
    service.listeners[wire].close()
    async with draft.target(service.address) as target:
        await draft.eventually(lambda: f"offers no {wire}" in caplog.text)
        assert target.drafting.is_away


async def test_sockets_that_fail_cost_their_speed_only(
    service: Any, draft: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for listener in service.listeners.values():
        listener._offered = _Forgetful()
    async with draft.target(service.address, wire="auto") as target:
        await target.connected()
        assert target.drafting._stream.wire == "grpc"
        assert isinstance((await target.step(draft.task("a", 0, [1])))[0], Proposal)
    assert caplog.text.count("drafts travel another way") == 2


async def test_a_socket_that_says_nothing_costs_its_time_only(
    service: Any, draft: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a firewall that swallows what is sent."""
    monkeypatch.setattr("kvbraid.transport.draft_connection._CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        door = service.listeners["tcp"]._door
        door._port = silent.getsockname()[1]
        monkeypatch.setattr("kvbraid.transport.draft_connection.socket_reach", lambda: "elsewhere")
        async with draft.target(service.address, wire="auto") as target:
            await target.connected()
            assert target.drafting._stream.wire == "grpc"
    assert "drafts travel another way" in caplog.text


class _Forgetful(dict[bytes, Any]):
    """Knows no token."""

    def pop(self, *_: Any) -> None:
        return None


# What a stream promises.


async def test_a_repeated_step_is_answered_as_before_whatever_way_it_comes(
    raw: Any, service: Any, draft: Any
) -> None:
    first = await raw.step(1, [draft.task("a", 0, [1, 2])])
    assert await raw.step(1, [draft.task("a", 0, [30])]) == first
    by_grpc = draft.raw(service)
    await by_grpc.open()
    assert await by_grpc.step(1, [draft.task("a", 0, [1, 2])]) == first
    assert len(service.proposer.tasks) == 1


async def test_a_step_repeated_while_it_is_computed_is_computed_once(
    raw: Any, wire: str, service: Any, draft: Any
) -> None:
    service.proposer.gate.clear()
    early = asyncio.create_task(raw.step(1, [draft.task("a", 0, [1])]))
    await asyncio.to_thread(service.proposer.arrived.wait, 10)
    newer = draft.raw_socket(service, wire)
    await newer.open()
    late = asyncio.create_task(newer.step(1, [draft.task("a", 0, [1])]))
    service.proposer.gate.set()
    assert list((await late).token_ids) == list((await early).token_ids) == [2, 3, 4]
    assert len(service.proposer.tasks) == 1
    newer.socket.close()


async def test_steps_in_pieces_and_steps_at_once_are_answered_in_order(
    raw: Any, service: Any, draft: Any
) -> None:
    requests = [draft.request(number, [draft.task("a", number - 1, [number])]) for number in (1, 2)]
    frames = [frame_of(request.SerializeToString()) for request in requests]
    for cut in (frames[0][:2], frames[0][2:9], frames[0][9:] + frames[1]):
        await raw.send(cut)
    assert [(await raw.read()).step_id for _ in frames] == [1, 2]
    assert len(service.proposer.batches) == 2


async def test_a_step_that_waits_for_rows_is_not_overtaken(
    service: Any, target: Any, draft: Any
) -> None:
    assert target.drafting.open_grant("a", 8) is not None
    stream = stream_of(target)
    waiting = stream.begin_step([draft.task("a", 4, [1])], ())
    behind = [stream.begin_step([draft.task(key, 0, [1])], ()) for key in "bc"]
    assert await asyncio.to_thread(behind[-1].wait, 10)
    assert waiting.is_done
    assert [batch[0][-1] for batch in service.proposer.batches] == ["a", "b", "c"]
    assert service.proposer.tasks[0].starts_cold, "nobody pushed what comes before"


async def test_steps_that_wait_in_sockets_are_counted_and_computed_together(
    service: Any, draft: Any, wire: str
) -> None:
    streams = [draft.raw_socket(service, wire, incarnation=number) for number in (1, 2, 3)]
    for stream in streams:
        await stream.open()
        await stream.step(1, [draft.task("a", 0, [1]), draft.task("b", 0, [1])])
    service.proposer.gate.clear()
    service.proposer.arrived.clear()
    first, *others = streams
    blocker = asyncio.create_task(first.step(2, [draft.task("a", 0, [1])]))
    await asyncio.to_thread(service.proposer.arrived.wait, 10)
    both = [asyncio.create_task(stream.step(2, [draft.task("a", 0, [2])])) for stream in others]
    await draft.eventually(lambda: service.num_queued == 4)  # as many as their last steps had
    service.proposer.gate.set()
    await asyncio.gather(blocker, *both)
    assert sorted(service.proposer.batches[-1]) == ["2/a", "3/a"]
    assert service.num_queued == 0
    assert service.sample("kvbraid_draft_queue_seconds_sum") > 0
    for stream in streams:
        stream.socket.close()


# How it ends.


async def test_what_is_wrong_with_a_step_ends_the_call_with_its_status(
    raw: Any, wire: str, service: Any, draft: Any
) -> None:
    for number in range(10, 20):
        await raw.step(number, [draft.task("a", 0, [1])])
    assert await raw.step(10, [draft.task("a", 0, [1])]) is None
    await ends_with(Code.INVALID_ARGUMENT, "above 19", raw)
    for changes, code, words in (
        ({"epoch": 5}, Code.ABORTED, "epoch 5 is over"),
        ({"anchor_ids": [4000]}, Code.INVALID_ARGUMENT, "anchor_ids has 4000"),
        ({"rows": pb.DraftRows(shared_bytes=1 << 40)}, Code.INVALID_ARGUMENT, "rows have"),
        ({"rows": pb.DraftRows(following_bytes=16)}, Code.INVALID_ARGUMENT, "rows have 0 bytes"),
    ):
        stream = draft.raw_socket(service, wire)
        await stream.open()
        assert await stream.step(30, [draft.task("a", 0, [1])], **changes) is None
        await ends_with(code, words, stream)
        stream.socket.close()


GARBAGE = [
    (frame_of(b"\xff" * 9), Code.INVALID_ARGUMENT, "not a request"),
    (b"\xff" * 8, Code.DATA_LOSS, "a frame of 8589934590 bytes"),
    (frame_of(b""), Code.INVALID_ARGUMENT, "first message only"),
    (frame_of(b"\x0a\x00"), Code.INVALID_ARGUMENT, "hello is accepted as first message only"),
    (frame_of(b"\x12\x00"), Code.INVALID_ARGUMENT, "a key has 0 characters"),
]


@pytest.mark.parametrize(("garbage", "code", "words"), GARBAGE)
async def test_garbage_ends_its_own_stream_only(
    garbage: bytes, code: Code, words: str, raw: Any, target: Any, draft: Any
) -> None:
    await raw.send(garbage)
    await ends_with(code, words, raw)
    assert isinstance((await target.step(draft.task("a", 0, [1])))[0], Proposal)


async def test_a_worker_whose_stream_ends_by_garbage_comes_back(target: Any, draft: Any) -> None:
    before: Any = stream_of(target)
    before._socket.sendmsg([GARBAGE[0][0]])
    await draft.eventually(lambda: target.drafting._stream not in (before, None))
    assert isinstance((await target.step(draft.task("a", 0, [1])))[0], Proposal)


async def test_the_newer_stream_of_a_worker_is_the_one_that_counts(
    raw: Any, wire: str, service: Any, draft: Any
) -> None:
    newer = draft.raw_socket(service, wire)
    await newer.open()
    await newer.step(1, [draft.task("a", 0, [1])])
    assert await raw.step(2, [draft.task("a", 0, [1])]) is None
    await ends_with(Code.ABORTED, "another stream", raw)
    assert (await newer.step(2, [draft.task("a", 1, [2])])).step_id == 2
    newer.socket.close()


async def test_a_socket_ends_with_its_call_whatever_is_computed(
    raw: Any, service: Any, draft: Any
) -> None:
    service.proposer.gate.clear()
    waiting = asyncio.create_task(raw.step(1, [draft.task("a", 0, [1])]))
    await asyncio.to_thread(service.proposer.arrived.wait, 10)
    raw.call.cancel()
    async with asyncio.timeout(10):
        assert await waiting is None
    service.proposer.gate.set()


async def test_a_stream_has_one_socket(raw: Any, service: Any, draft: Any) -> None:
    another = draft.raw_socket(service, "tcp")
    terms = await another.open()
    second = await asyncio.to_thread(draft.connect, "local_socket", terms)
    with second:
        assert await asyncio.to_thread(second.recv, 1) == b""
    assert (await another.step(1, [draft.task("a", 0, [1])])).step_id == 1
    another.socket.close()


@pytest.mark.parametrize("garbage", [frame_of(b"\xff" * 9), b"\xff" * 8, frame_of(b"")])
async def test_garbage_of_the_service_costs_one_step(
    garbage: bytes, service: Any, target: Any, draft: Any
) -> None:
    before: Any = stream_of(target)
    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    theirs.send(garbage)
    before._socket.close()
    before._socket = ours
    before._readable.register(ours)
    assert await target.step(draft.task("a", 0, [1])) == [None]
    assert target.fallbacks("unavailable") == 1
    theirs.close()
    await draft.eventually(lambda: target.drafting._stream not in (before, None))
    assert isinstance((await target.step(draft.task("a", 0, [1])))[0], Proposal)


@pytest.mark.parametrize("is_answering", [False, True])
async def test_a_worker_that_vanishes_is_forgotten(
    is_answering: bool, service: Any, target: Any, draft: Any
) -> None:
    if is_answering:
        service.proposer.gate.clear()
        stream_of(target).begin_step([draft.task("a", 0, [1])], ())
        await asyncio.to_thread(service.proposer.arrived.wait, 10)
    await target.drafting.stop()
    name = "kvbraid_draft_connected_workers"
    await draft.eventually(lambda: service.sample(name) == 0)
    service.proposer.gate.set()
    async with draft.target(service.address, incarnation=6) as other:
        await other.connected()
        assert isinstance((await other.step(draft.task("a", 0, [1])))[0], Proposal)
    offered = [listener._offered for listener in service.listeners.values()]
    await draft.eventually(lambda: offered == [{}, {}])


async def test_a_step_that_the_service_never_reads_ends_in_time(
    service: Any, target: Any, draft: Any
) -> None:
    """The service's compute thread stands still: nothing takes the bytes."""
    service.proposer.gate.clear()
    stream = stream_of(target)
    keys = ["k" * 200] * 4096
    steps = []
    while not stream._is_closed:
        steps.append(stream.begin_step([draft.task("a", 0, [1])], keys))
        assert len(steps) < 50
    assert all(step.is_done and step.answered is None for step in steps)


async def test_a_step_larger_than_the_sockets_room_arrives(
    service: Any, target: Any, draft: Any
) -> None:
    """Here the compute thread stands still for a while, and what has no room waits."""
    service.proposer.gate.clear()
    stream: Any = stream_of(target)
    stream._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    first = stream.begin_step([draft.task("a", 0, [1])], ())
    await asyncio.to_thread(service.proposer.arrived.wait, 10)
    large = stream.begin_step([draft.task("b", 0, [1])], [f"{i:0200}" for i in range(4096)])
    assert stream._unsent
    assert not large.wait(0)
    service.proposer.gate.set()
    assert await asyncio.to_thread(large.wait, 20)
    assert first.answered is not None
    assert large.answered is not None
    assert len(service.proposer.dropped) == 4096


async def test_a_worker_that_does_not_read_keeps_nobody_else_waiting(
    raw: Any, service: Any, draft: Any, stack: AsyncExitStack
) -> None:
    """It has many steps of many drafts answered into a socket that it never empties."""
    service.proposer.answer = lambda task: Proposal((1,) * 4096, (0.5,) * 4096)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        raw.socket.setsockopt(socket.SOL_SOCKET, option, 1 << 16)
    tasks = [draft.task(key, 0, [1]) for key in "abcdefgh"]

    def flood() -> None:
        raw.socket.settimeout(1.0)
        number = 0
        try:
            while True:
                number += 1
                raw.socket.sendall(frame_of(draft.request(number, tasks).SerializeToString()))
        except TimeoutError:
            return

    await asyncio.to_thread(flood)
    other = await stack.enter_async_context(draft.target(service.address, incarnation=6))
    await other.connected()
    assert (await other.step(draft.task("a", 0, [1])))[0] is not None
    num_batches = len(service.proposer.batches)
    assert num_batches < 100, "about as many as its socket has room for answers"
    await other.step(draft.task("a", 1, [1]))
    assert len(service.proposer.batches) == num_batches + 1, "no more of its steps are taken"
    raw.call.cancel()
    await draft.eventually(lambda: service.sample("kvbraid_draft_connected_workers") == 1)
