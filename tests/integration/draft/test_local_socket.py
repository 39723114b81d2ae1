"""The local socket of a draft service: who is let in, what it carries, how either end leaves."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

from draft_service.local_listener import LocalListener, LocalPeer
from kvbraid.errors import UnavailableError
from kvbraid.speculative.proposal import Proposal
from kvbraid.transport import shared_rows
from kvbraid.transport.draft_terms import LocalSocketOffer
from kvbraid.transport.local_draft_stream import LocalDraftStream, connect_local_socket
from kvbraid.transport.local_socket import abstract_address, frame_of, socket_reach
from kvbraid.transport.shared_rows import RowMemory, memory_bytes, new_row_memory


@pytest.fixture
def wire() -> str:
    return "local_socket"


def stream_of(target: Any) -> LocalDraftStream:
    stream = target.drafting._stream
    assert isinstance(stream, LocalDraftStream)
    return stream


async def test_auto_takes_the_socket_on_one_host_and_grpc_where_it_does_not_reach(
    service: Any, draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with draft.target(service.address, wire="auto") as near:
        await near.connected()
        assert near.drafting._stream.wire == "local_socket"
    monkeypatch.setattr("kvbraid.transport.draft_connection.socket_reach", lambda: "another host")
    async with draft.target(service.address, wire="auto") as far:
        await far.connected()
        assert far.drafting._stream.wire == "grpc"


async def test_a_service_without_a_socket_is_used_by_grpc_unless_the_socket_is_asked_for(
    service: Any, draft: Any, caplog: pytest.LogCaptureFixture
) -> None:
    service.listener.close()
    async with draft.target(service.address, wire="auto") as any_way:
        await any_way.connected()
        assert isinstance((await any_way.step(draft.task("a", 0, [1])))[0], Proposal)
    async with draft.target(service.address) as target:
        await draft.eventually(lambda: "offers no local socket" in caplog.text)
        assert target.drafting.is_away


async def test_a_socket_that_fails_costs_its_speed_only(
    service: Any, draft: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service.listener._offered = _Forgetful()
    async with draft.target(service.address, wire="auto") as target:
        await target.connected()
        assert target.drafting._stream.wire == "grpc"
        assert isinstance((await target.step(draft.task("a", 0, [1])))[0], Proposal)
    assert "drafts travel by gRPC, the local socket failed" in caplog.text


class _Forgetful(dict[bytes, Any]):
    """Knows no token."""

    def pop(self, *_: Any) -> None:
        return None


@pytest.mark.parametrize("limit", [0, 1 << 40])
async def test_rows_are_the_same_in_shared_memory_and_in_the_message(
    limit: int, service: Any, target: Any, draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_rows, "_MIN_SHARED_BYTES", limit)
    first = draft.task("a", 0, [1, 2, 3])
    second = draft.task("b", 0, [4, 5], rows=torch.full((2, draft.hidden), 7.0).double())
    answers = await target.step(first, second)
    assert [type(answer) for answer in answers] == [Proposal, Proposal]
    got = [task.rows for task in service.proposer.tasks]
    torch.testing.assert_close(got[0], draft.rows(0, 3))
    torch.testing.assert_close(got[1], torch.full((2, draft.hidden), 7.0))
    stream = stream_of(target)
    memory = stream._shared._memory
    used = memory._mapping[:]
    assert any(used) == (limit == 0)


async def test_the_memory_is_not_written_before_its_step_is_answered(
    service: Any, target: Any, draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_rows, "_MIN_SHARED_BYTES", 0)
    stream = stream_of(target)
    service.proposer.gate.clear()
    slow = stream.begin_step([draft.task("a", 0, [1])], ())
    late = stream.begin_step([draft.task("b", 0, [1], rows=torch.full((1, 4), 9.0))], ())
    assert not slow.wait(0)
    service.proposer.gate.set()
    assert await asyncio.to_thread(late.wait, 10)
    rows = {task.key[-1]: task.rows for task in service.proposer.tasks}
    torch.testing.assert_close(rows["a"], draft.rows(0, 1))
    torch.testing.assert_close(rows["b"], torch.full((1, 4), 9.0))
    assert slow.is_done, "whoever reads resolves every step"
    assert slow.answered is not None


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


async def test_not_finite_shared_rows_are_refused(
    target: Any, draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_rows, "_MIN_SHARED_BYTES", 0)
    poisoned = torch.full((1, draft.hidden), float("nan"))
    answers = await target.step(draft.task("a", 0, [1], rows=poisoned), draft.task("b", 0, [1]))
    assert answers[0] is None
    assert isinstance(answers[1], Proposal)


GARBAGE = [
    frame_of(b"\xff" * 9),
    b"\xff\xff\xff\xff",
    frame_of(b""),
    frame_of(b"\x0a\x00"),  # hello, again
]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_ends_its_own_stream_and_the_worker_comes_back(
    garbage: bytes, service: Any, target: Any, draft: Any
) -> None:
    async with draft.target(service.address, incarnation=6) as other:
        await other.connected()
        before = stream_of(target)
        before._socket.send(garbage)
        await draft.eventually(lambda: target.drafting._stream not in (before, None))
        assert isinstance((await target.step(draft.task("a", 0, [1])))[0], Proposal)
        assert isinstance((await other.step(draft.task("a", 0, [1])))[0], Proposal)


@pytest.mark.parametrize("garbage", [frame_of(b"\xff" * 9), b"\xff\xff\xff\xff", frame_of(b"")])
async def test_garbage_of_the_service_costs_one_step(
    garbage: bytes, service: Any, target: Any, draft: Any
) -> None:
    before = stream_of(target)
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
    assert service.listener._offered == {}


async def test_a_step_that_the_service_never_reads_ends_in_time(target: Any, draft: Any) -> None:
    """The service's loop stands still, as one does that is stopped: nothing takes the bytes."""
    stream = stream_of(target)
    tasks = [draft.task("a", 0, [1])]
    keys = ["k" * 200] * 4096
    steps = []
    while not stream._is_closed:
        steps.append(stream.begin_step(tasks, keys))
        assert len(steps) < 50
    assert all(step.is_done and step.answered is None for step in steps)


# Who is let in.


@pytest.fixture
async def listener(draft: Any) -> Any:
    listening = LocalListener(draft.terms)
    listening.start()
    yield listening
    listening.close()


def connected(listener: LocalListener) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect(abstract_address(listener._name))
    return connection


async def ended(connection: socket.socket) -> bool:
    with connection:
        try:
            return await asyncio.to_thread(connection.recv, 1) == b""
        except ConnectionResetError:
            return True


async def test_a_token_is_good_for_one_connection_of_its_stream(
    listener: LocalListener, draft: Any
) -> None:
    peers: list[LocalPeer] = []
    offer = listener.offer(peers.append)
    assert offer is not None
    assert offer.host_id == socket_reach() != ""
    connect = connect_local_socket
    connection, memory = await asyncio.to_thread(connect, offer, draft.terms, timeout_s=5)
    assert memory.num_bytes == memory_bytes(draft.terms.row_format, 16) == 16 * 16
    with connection, peers[0].connection, pytest.raises(UnavailableError):
        await asyncio.to_thread(connect, offer, draft.terms, timeout_s=5)
    withdrawn = listener.offer(peers.append)
    assert withdrawn is not None
    listener.withdraw(withdrawn)
    with pytest.raises(UnavailableError):
        await asyncio.to_thread(connect, withdrawn, draft.terms, timeout_s=5)
    assert len(peers) == 1


async def test_another_user_is_not_let_in(
    listener: LocalListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbraid.transport.local_socket.os.getuid", lambda: 12345)
    assert await ended(connected(listener))
    assert listener._strangers == {}


def bare(num_bytes: int) -> int:
    """Memory without seals."""
    fd = os.memfd_create("bare")
    os.ftruncate(fd, num_bytes)
    return fd


@pytest.mark.parametrize("make", [lambda n: bare(n), lambda n: new_row_memory(n + 1), None])
async def test_memory_that_is_missing_or_could_shrink_is_refused(
    make: Any, listener: LocalListener
) -> None:
    offer = listener.offer(lambda peer: pytest.fail("let in"))
    assert isinstance(offer, LocalSocketOffer)
    fds = [] if make is None else [make(16 * 16)]
    stranger = connected(listener)
    socket.send_fds(stranger, [offer.token], fds)
    for fd in fds:
        os.close(fd)
    assert await ended(stranger)


async def test_strangers_are_few_and_go(
    listener: LocalListener, monkeypatch: pytest.MonkeyPatch, draft: Any, stack: AsyncExitStack
) -> None:
    monkeypatch.setattr("draft_service.local_listener._MAX_STRANGERS", 2)
    silent = [stack.enter_context(connected(listener)) for _ in range(2)]
    await draft.eventually(lambda: len(listener._strangers) == 2)
    assert await ended(connected(listener))
    silent[0].send(b"x" * 32)
    await draft.eventually(lambda: len(listener._strangers) == 1)
    listener.close()
    assert await ended(silent[1])


def test_row_memory_is_seen_by_both() -> None:
    fd = new_row_memory(64)
    ours, theirs = RowMemory(os.dup(fd), 64), RowMemory(fd, 64)
    ours._mapping[:3] = b"abc"
    assert theirs._mapping[:3] == b"abc"
