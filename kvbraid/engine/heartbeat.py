"""Notices within seconds that a rank of this host is dead or frozen, and ends the worker.

Every rank writes its pid and a counter into shared memory from a thread of its own and watches
all others. A rank is lost when its process is gone, or when for `timeout_s` neither its counter
nor its CPU time has moved (a stopped or stuck process), or when the counter alone has not moved
for ten times that (a process that computes but never gives the interpreter lock away, as long C
calls do for a while). Knows no torch.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from kvbraid.engine.ranks import RankContext
from kvbraid.engine.segment import HEADER_BYTES, MAX_RANKS, map_segment, no_check

logger = logging.getLogger(__name__)

EXIT_CODE_RANK_LOST = 70
_LINE_WORDS = 8
_PID, _START_TIME, _COUNTER, _STATE = range(4)
_RUNNING, _STOPPED = 1, 2
_BUSY_FACTOR = 10


class ProcessStatus(NamedTuple):
    """One line of /proc: state letter, start time and CPU time used, both in clock ticks."""

    state: str
    start_time: int
    cpu_time: int


def read_process(pid: int) -> ProcessStatus | None:
    """What /proc says about the process, None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return ProcessStatus(fields[0], int(fields[19]), int(fields[11]) + int(fields[12]))


class _Watch:
    """What is known about one peer, from this rank's own ticks."""

    def __init__(self) -> None:
        self.counter = -1
        self.cpu_time = -1
        self.silent_s = 0.0  # counter has not moved
        self.frozen_s = 0.0  # nor has CPU time


class Heartbeat:
    """This rank's beat and its watch over the other ranks of the host.

    on_lost(reason) is called once, from the heartbeat thread, when a rank is lost; by default the
    worker ends (`end_worker`). A rank that calls `stop` leaves in peace.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        timeout_s: float = 2.0,
        interval_s: float = 0.1,
        start_timeout_s: float = 60.0,
        on_lost: Callable[[str], None] | None = None,
        check: Callable[[], None] = no_check,
    ) -> None:
        """Waits until every rank of the host has come; `check` is called while waiting."""
        if not 0.0 < interval_s <= timeout_s / 4:
            raise ValueError(f"interval_s {interval_s} must be in (0, timeout_s {timeout_s} / 4]")
        self._context, self._timeout_s, self._interval_s = context, timeout_s, interval_s
        self._on_lost = on_lost or self.end_worker
        memory = map_segment(
            f"{context.run_id}-heartbeat{context.rank - context.local_rank}",
            num_bytes=HEADER_BYTES + MAX_RANKS * _LINE_WORDS * 8,
            rank=context.local_rank,
            size=context.local_world_size,
            timeout_s=start_timeout_s,
            check=check,
        )
        self._words = memoryview(memory)[HEADER_BYTES:].cast("q")
        self._watches = {
            local: _Watch()
            for local in range(context.local_world_size)
            if local != context.local_rank
        }
        self._own_line = context.local_rank * _LINE_WORDS
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Publishes this process and starts to beat and watch."""
        status = read_process(os.getpid())
        assert status is not None
        self._words[self._own_line + _PID] = os.getpid()
        self._words[self._own_line + _START_TIME] = status.start_time
        self._words[self._own_line + _STATE] = _RUNNING
        self._thread.start()

    def stop(self) -> None:
        """Tells the others that this rank ends on purpose, and stops watching them."""
        self._words[self._own_line + _STATE] = _STOPPED
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def end_worker(self, reason: str) -> NoReturn:
        """Kills the other local ranks, frozen ones too, and exits with code 70.

        Only rank 0 kills a healthy rank 0: so its exit code says what happened, not "killed".
        """
        logger.critical("rank %d ends its worker: %s", self._context.rank, reason)
        for local, watch in self._watches.items():
            if local == 0 and watch.frozen_s < self._timeout_s / 2:
                continue
            self._kill(local)
        os._exit(EXIT_CODE_RANK_LOST)

    def _kill(self, local: int) -> None:
        pid, start_time = self._words[local * _LINE_WORDS : local * _LINE_WORDS + 2]
        status = read_process(pid) if pid else None
        if status is not None and status.start_time == start_time:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                logger.info("rank with pid %d had already ended", pid)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(self._interval_s):
            self._words[self._own_line + _COUNTER] += 1
            now = time.monotonic()
            # After a pause of this process or host, peers had no chance to beat either.
            elapsed_s = min(now - last, 2 * self._interval_s)
            last = now
            for local, watch in self._watches.items():
                reason = self._lost_reason(local, watch, elapsed_s)
                if reason is not None and not self._stop.is_set():
                    self._on_lost(reason)
                    return

    def _lost_reason(self, local: int, watch: _Watch, elapsed_s: float) -> str | None:
        line = local * _LINE_WORDS
        pid, start_time, counter, state = self._words[line : line + 4]
        if state != _RUNNING:
            return None
        name = f"rank {self._context.local_ranks[local]} (pid {pid})"
        status = read_process(pid)
        if status is None or status.state in "ZX" or status.start_time != start_time:
            # It may have stopped in peace between the two looks.
            return None if self._words[line + _STATE] == _STOPPED else f"{name} is dead"
        has_beaten, has_run = counter != watch.counter, status.cpu_time != watch.cpu_time
        watch.counter, watch.cpu_time = counter, status.cpu_time
        watch.silent_s = 0.0 if has_beaten else watch.silent_s + elapsed_s
        watch.frozen_s = 0.0 if has_beaten or has_run else watch.frozen_s + elapsed_s
        if watch.frozen_s > self._timeout_s:
            return f"{name} has been frozen for {watch.frozen_s:.1f} s"
        if watch.silent_s > self._timeout_s * _BUSY_FACTOR:
            return f"{name} has not given a sign of life for {watch.silent_s:.1f} s"
        return None
