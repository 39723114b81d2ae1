"""What the local socket adds to the others: memory for rows, and who shares it."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import pytest
import torch

from draft_service.local_door import LocalDoor
from draft_service.socket_listener import SocketListener, SocketPeer
from kvbraid.speculative.proposal import Proposal
from kvbraid.transport import shared_rows
from kvbraid.transport.draft_socket import connect_local_socket
from kvbraid.transport.draft_terms import LocalSocketOffer
from kvbraid.transport.local_socket import abstract_address, socket_reach
from kvbraid.transport.shared_rows import RowMemory, memory_bytes, new_row_memory
from kvbraid.transport.socket_draft_stream import SocketDraftStream


@pytest.fixture
def wire() -> str:
    return "local_socket"


def stream_of(target: Any) -> SocketDraftStream:
    stream = target.drafting._stream
    assert isinstance(stream, SocketDraftStream)
    return stream


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
    shared: Any = stream_of(target)._shared
    used = shared._memory._mapping[:]
    assert any(used) == (limit == 0)


async def test_the_memory_is_not_written_before_its_step_is_answered(
    service: Any, target: Any, draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_rows, "_MIN_SHARED_BYTES", 0)
    stream = stream_of(target)
    service.proposer.gate.clear()
    async with draft.target(service.address, incarnation=6) as other:
        await other.connected()
        other.drafting._stream.begin_step([draft.task("c", 0, [1])], ())
        await asyncio.to_thread(service.proposer.arrived.wait, 10)
        # Now the service reads nothing.
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


async def test_not_finite_shared_rows_are_refused(
    target: Any, draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_rows, "_MIN_SHARED_BYTES", 0)
    poisoned = torch.full((1, draft.hidden), float("nan"))
    answers = await target.step(draft.task("a", 0, [1], rows=poisoned), draft.task("b", 0, [1]))
    assert answers[0] is None
    assert isinstance(answers[1], Proposal)


# Who is let in.


@pytest.fixture
async def door(draft: Any) -> LocalDoor:
    return LocalDoor(draft.terms)


@pytest.fixture
async def listener(door: LocalDoor) -> Any:
    listening = SocketListener(door)
    listening.start()
    yield listening
    listening.close()


def connected(door: LocalDoor) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect(abstract_address(door.name))
    return connection


async def ended(connection: socket.socket) -> bool:
    with connection:
        try:
            return await asyncio.to_thread(connection.recv, 1) == b""
        except ConnectionResetError:
            return True


async def test_memory_comes_with_the_token(listener: SocketListener, draft: Any) -> None:
    peers: list[SocketPeer] = []
    offer = listener.offer(peers.append)
    assert isinstance(offer, LocalSocketOffer)
    assert offer.host_id == socket_reach() != ""
    connected = await asyncio.to_thread(connect_local_socket, offer, draft.terms, timeout_s=5)
    memories = [connected.memory, peers[0].memory]
    sizes = [memory.num_bytes for memory in memories if memory is not None]
    assert sizes == [memory_bytes(draft.terms.row_format, 16)] * 2 == [16 * 16] * 2
    connected.connection.close()
    peers[0].connection.close()


async def test_another_user_is_not_let_in(
    listener: SocketListener, door: LocalDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbraid.transport.local_socket.os.getuid", lambda: 12345)
    monkeypatch.setattr("draft_service.socket_listener._TOKEN_S", 3600)
    assert await ended(connected(door))
    assert listener._strangers == {}


def bare(num_bytes: int) -> int:
    """Memory without seals."""
    fd = os.memfd_create("bare")
    os.ftruncate(fd, num_bytes)
    return fd


@pytest.mark.parametrize("make", [lambda n: bare(n), lambda n: new_row_memory(n + 1), None])
async def test_memory_that_is_missing_or_could_shrink_is_refused(
    make: Any, listener: SocketListener, door: LocalDoor
) -> None:
    offer = listener.offer(lambda peer: pytest.fail("let in"))
    assert isinstance(offer, LocalSocketOffer)
    fds = [] if make is None else [make(16 * 16)]
    stranger = connected(door)
    socket.send_fds(stranger, [offer.token], fds)
    for fd in fds:
        os.close(fd)
    assert await ended(stranger)


def test_row_memory_is_seen_by_both() -> None:
    fd = new_row_memory(64)
    ours, theirs = RowMemory(os.dup(fd), 64), RowMemory(fd, 64)
    ours._mapping[:3] = b"abc"
    assert theirs._mapping[:3] == b"abc"
