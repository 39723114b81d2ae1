"""A lost host ends the worker in time, whatever the ranks of the other hosts wait for."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbraid.engine.heartbeat import EXIT_CODE_RANK_LOST
from kvbraid.engine.host_heartbeat import HostHeartbeat, HostLink, connect_hosts
from kvbraid.engine.rank_lost import RankLostError
from kvbraid.engine.ranks import RankContext, start_run

PROGRAM = Path(__file__).parent / "rank_programs" / "host_rank.py"
TIMEOUT_S = 0.4
Process = subprocess.Popen[str]


@contextmanager
def hosts(size: int, mode: str) -> Iterator[list[Process]]:
    """One process a host, all of them ready."""
    port = start_run(size).master_port
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(size), str(port), str(TIMEOUT_S), mode],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("how", "limit_s", "complaint"),
    [
        (signal.SIGKILL, 2.0, "is gone"),
        (signal.SIGSTOP, 10 * TIMEOUT_S + 2.0, "has not given a sign of life"),
    ],
)
def test_ranks_inside_a_collective_end_when_another_host_is_lost(
    how: signal.Signals, limit_s: float, complaint: str
) -> None:
    with hosts(3, "wait") as (*survivors, lost):
        began = time.monotonic()
        lost.send_signal(how)
        for survivor in survivors:
            code = survivor.wait(limit_s + 10)
            assert time.monotonic() - began < limit_s
            assert code == EXIT_CODE_RANK_LOST
        assert survivors[0].stderr is not None
        words = survivors[0].stderr.read()
        assert "rank 0 ends its worker: the host of rank 2 " + complaint in words


def test_the_loss_of_rank_0_ends_the_other_hosts() -> None:
    with hosts(2, "leave") as (leader, other):
        leader.kill()
        assert other.wait(5) == EXIT_CODE_RANK_LOST


def test_hosts_that_stop_leave_in_peace_in_any_order() -> None:
    with hosts(3, "leave") as processes:
        for process in (processes[1], processes[0], processes[2]):
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
            assert process.wait(10) == 0


@contextmanager
def linked_pair(reasons: queue.Queue[str]) -> Iterator[tuple[HostHeartbeat, socket.socket]]:
    """A heartbeat with one link, and the bare other end of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        own, _ = listener.accept()
    heartbeat = HostHeartbeat([HostLink(4, own, 0.1)], reasons.put, interval_s=0.01)
    heartbeat.start()
    try:
        yield heartbeat, peer
    finally:
        heartbeat.stop()
        peer.close()


def test_a_peer_that_beats_is_alive_one_that_falls_silent_is_lost_once() -> None:
    reasons: queue.Queue[str] = queue.Queue()
    with linked_pair(reasons) as (_, peer):
        for _ in range(15):  # longer than the limit of 1 s in all
            peer.sendall(b".")
            with pytest.raises(queue.Empty):
                reasons.get(timeout=0.1)
        began = time.monotonic()
        reason = reasons.get(timeout=5)
        assert "the host of rank 4 has not given a sign of life" in reason
        assert time.monotonic() - began > 0.8
        assert peer.recv(4096).strip(b".") == b"", "beats were sent"
        with pytest.raises(queue.Empty):
            reasons.get(timeout=0.1)


def test_a_closed_connection_is_a_loss_unless_a_farewell_came_first() -> None:
    for last_words, is_lost in ((b".", True), (b".!", False)):
        reasons: queue.Queue[str] = queue.Queue()
        with linked_pair(reasons) as (_, peer):
            peer.sendall(last_words)
            peer.close()
            if is_lost:
                assert "the host of rank 4 is gone" in reasons.get(timeout=5)
            else:
                with pytest.raises(queue.Empty):
                    reasons.get(timeout=0.2)


def test_a_host_that_does_not_come_is_named_and_strangers_are_sent_away(
    as_threads: Callable[[int, Callable[[Any], object]], list[object]],
) -> None:
    def one(group: Any) -> str:
        context = RankContext(group.rank, 2, 0, 1, "test-hosts", "127.0.0.1", 1)
        if group.rank == 0:
            with pytest.raises(RankLostError, match="rank 1 has not come in time"):
                connect_hosts(context, group, print, timeout_s=1.0, start_timeout_s=0.5)
            return "told"
        group.all_gather(torch.tensor([0]))
        port = int(group.broadcast(torch.zeros(2, dtype=torch.int64), 0)[0])
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"x" * 16)
            assert stranger.recv(1) == b""
        return "sent away"

    assert as_threads(2, one) == ["told", "sent away"]


def test_one_host_needs_no_links() -> None:
    heartbeat = connect_hosts(
        RankContext(0, 2, 0, 2, "one-host"),
        None,
        print,
        timeout_s=1.0,  # type: ignore[arg-type]
    )
    heartbeat.start()
    heartbeat.stop()
