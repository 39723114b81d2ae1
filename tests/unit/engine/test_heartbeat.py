"""A rank that is killed or frozen takes its worker down in time; one that stops does not."""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvbraid.engine.heartbeat import EXIT_CODE_RANK_LOST, Heartbeat, read_process
from kvbraid.engine.ranks import RankContext

PROGRAM = Path(__file__).parent / "rank_programs" / "beating_rank.py"
TIMEOUT_S = 1.0


@dataclass
class World:
    """Ranks as processes; `pids` in rank order."""

    leader: subprocess.Popen[str]
    pids: list[int]
    pidfds: list[int]

    def wait_until_all_ended(self, limit_s: float) -> float:
        """Seconds until every process has ended; fails after limit_s."""
        start = time.monotonic()
        for rank, descriptor in enumerate(self.pidfds):
            left = limit_s - (time.monotonic() - start)
            ended, _, _ = select.select([descriptor], [], [], max(0.0, left))
            assert ended, f"rank {rank} still lives after {limit_s} s"
        return time.monotonic() - start

    def read_line(self) -> str:
        assert self.leader.stdout is not None
        return self.leader.stdout.readline().strip()


@contextmanager
def world(size: int, mode: str) -> Iterator[World]:
    command = [sys.executable, str(PROGRAM), str(size), str(TIMEOUT_S), mode]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    descriptors: dict[int, int] = {}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True) as leader:
        try:
            pids: dict[int, int] = {}
            assert leader.stdout is not None
            while len(pids) < size:
                word, rank, pid = leader.stdout.readline().split()
                assert word == "ready"
                pids[int(rank)] = int(pid)
                descriptors[int(rank)] = os.pidfd_open(int(pid))
            order = range(size)
            yield World(leader, [pids[r] for r in order], [descriptors[r] for r in order])
        finally:
            leader.kill()
            for descriptor in descriptors.values():
                if not select.select([descriptor], [], [], 0)[0]:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                os.close(descriptor)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_any_lost_rank_ends_the_worker_in_time(lost: int, how: signal.Signals) -> None:
    with world(3, "default") as ranks:
        os.kill(ranks.pids[lost], how)
        seconds = ranks.wait_until_all_ended(TIMEOUT_S + 5)
        assert seconds < TIMEOUT_S + 0.5
        code = ranks.leader.wait()
        assert code == (EXIT_CODE_RANK_LOST if lost > 0 else -signal.SIGKILL)


def test_a_killed_rank_is_noticed_at_once() -> None:
    with world(2, "default") as ranks:
        os.kill(ranks.pids[1], signal.SIGKILL)
        assert ranks.wait_until_all_ended(5) < 0.6


def test_ranks_that_stop_leave_in_peace() -> None:
    with world(3, "report") as ranks:
        assert ranks.leader.stdin is not None
        ranks.leader.stdin.close()
        assert ranks.read_line() == "stopped (0, 0) []"
        assert ranks.leader.wait() == 0


def test_a_rank_that_stops_first_is_not_missed() -> None:
    with world(3, "leave") as ranks:
        assert select.select([ranks.pidfds[2]], [], [], 5)[0], "rank 2 has not left"
        assert not select.select([ranks.leader.stdout], [], [], TIMEOUT_S + 0.5)[0]
        assert ranks.leader.stdin is not None
        ranks.leader.stdin.close()
        assert ranks.read_line() == "stopped (0, 0) []"


def test_a_loss_is_reported_once_and_names_the_rank() -> None:
    with world(2, "report") as ranks:
        os.kill(ranks.pids[1], signal.SIGKILL)
        assert ranks.read_line() == f"lost 0 rank 1 (pid {ranks.pids[1]}) is dead"
        assert ranks.leader.stdin is not None
        ranks.leader.stdin.close()
        assert ranks.read_line().startswith("stopped (-9,)")


def test_a_short_freeze_is_forgiven() -> None:
    with world(2, "report") as ranks:
        for _ in range(3):
            os.kill(ranks.pids[1], signal.SIGSTOP)
            _wait_for_state(ranks.pids[1], "T")
            # Shorter than the timeout each; together longer.
            assert not select.select([ranks.leader.stdout], [], [], TIMEOUT_S * 0.6)[0]
            os.kill(ranks.pids[1], signal.SIGCONT)
            assert not select.select([ranks.leader.stdout], [], [], 0.3)[0]


def test_children_die_with_their_parent_even_without_a_heartbeat() -> None:
    with world(3, "silent") as ranks:
        os.kill(ranks.pids[0], signal.SIGKILL)
        assert ranks.wait_until_all_ended(2) < 1.0


def test_a_rank_that_computes_without_beating_gets_ten_times_as_long() -> None:
    """The interpreter lock can be held for seconds by one C call; that is not a frozen process."""
    context = RankContext(0, 2, 0, 2, f"{os.getpid()}-0a0b0c0d-busy")
    busy = subprocess.Popen([sys.executable, "-c", BUSY_RANK.format(context=context)])
    reasons: queue.Queue[str] = queue.Queue()
    heartbeat = Heartbeat(context, timeout_s=0.2, interval_s=0.02, on_lost=reasons.put)
    start = time.monotonic()
    heartbeat.start()
    try:
        reason = reasons.get(timeout=10)
        seconds = time.monotonic() - start
    finally:
        heartbeat.stop()
        busy.kill()
        busy.wait()
    assert reasons.empty()
    assert "rank 1" in reason
    assert "sign of life" in reason
    assert 2.0 < seconds < 4.0


BUSY_RANK = """
import dataclasses, re
from kvbraid.engine.heartbeat import Heartbeat
from kvbraid.engine.ranks import RankContext
context = {context!r}
beat = Heartbeat(dataclasses.replace(context, rank=1, local_rank=1), timeout_s=0.2, interval_s=0.02)
beat.start()
re.match(r"(a+)+b", "a" * 60)  # one C call that keeps the interpreter lock for hours
"""


def test_interval_must_fit_the_timeout() -> None:
    context = RankContext(0, 1, 0, 1, "test-interval")
    with pytest.raises(ValueError, match=r"interval_s 0\.9"):
        Heartbeat(context, timeout_s=2.0, interval_s=0.9)


def test_proc_is_read_whatever_the_process_is_called() -> None:
    own = read_process(os.getpid())
    assert own is not None
    assert own.state == "R"
    assert own.start_time > 0
    awkward = subprocess.Popen(
        ["bash", "-c", "exec -a 'x) Z 1 (y' sleep 60"], stdout=subprocess.DEVNULL
    )
    try:
        status = read_process(awkward.pid)
        assert status is not None
        assert status.state in "RSD"
    finally:
        awkward.kill()
        awkward.wait()
    assert read_process(awkward.pid) is None


def _wait_for_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + 5
    while (status := read_process(pid)) is not None and status.state != state:
        assert time.monotonic() < deadline
        os.sched_yield()
