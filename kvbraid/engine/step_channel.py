"""How rank 0 tells the other ranks what to do next: one flat int64 array a step, no pickle."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvbraid.engine.rank_lost import RankLostError
from kvbraid.engine.ranks import RankContext
from kvbraid.engine.segment import HEADER_BYTES, MAX_RANKS, MemoryFence, map_segment, no_check

IntArray = npt.NDArray[np.int64]

_LINE_WORDS = 8
_LINES_OFFSET_WORDS = HEADER_BYTES // 8
_RING_OFFSET_WORDS = _LINES_OFFSET_WORDS + MAX_RANKS * _LINE_WORDS
_NUM_SLOTS = 4
_SLOT_WORDS = 8192
_SPIN_S = 0.002
_IDLE_SLEEP_S = 0.0005
_DOZE_AFTER_S = 1.0
_DOZE_SLEEP_S = 0.005


class StepChannel(Protocol):
    """A one-way, ordered channel from rank 0 to every other rank. One thread a rank uses it."""

    @property
    def num_receivers(self) -> int:
        """Ranks that `send` reaches; with none, a plan need not be encoded."""
        ...

    def send(self, plan: IntArray) -> None:
        """Rank 0 only. `plan` is a 1-D int64 array of any length, copied before this returns.

        Raises RankLostError when a rank has not taken earlier plans in time.
        """
        ...

    def receive(self, idle: Callable[[], None]) -> IntArray:
        """Other ranks only: the next plan, a fresh array. There is no time limit.

        `idle` is called again and again while waiting, every few milliseconds at least; it may
        raise to stop waiting.
        """
        ...


class SingleStepChannel:
    """The channel of a worker of one rank: there is nobody to tell."""

    num_receivers = 0

    def send(self, plan: IntArray) -> None:
        """Does nothing."""

    def receive(self, idle: Callable[[], None]) -> IntArray:
        """Never called: rank 0 does not receive."""
        raise ValueError("rank 0 sends step plans; only ranks above 0 receive them")


class SharedMemoryStepChannel:
    """StepChannel through a ring of 4 slots of 64 KiB in /dev/shm; longer plans take several.

    A slot begins with the number of words that the plan still has from here on. Rank 0 publishes
    how many slots it has filled, each other rank how many it has emptied.
    """

    def __init__(
        self,
        name: str,
        *,
        rank: int,
        size: int,
        timeout_s: float = 30.0,
        start_timeout_s: float = 60.0,
        check: Callable[[], None] = no_check,
    ) -> None:
        """Waits until every rank that gives the same name has come."""
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is outside [0, {size})")
        memory = map_segment(
            name,
            num_bytes=8 * (_RING_OFFSET_WORDS + _NUM_SLOTS * _SLOT_WORDS),
            rank=rank,
            size=size,
            timeout_s=start_timeout_s,
            check=check,
        )
        words = memoryview(memory).cast("q")
        self._counts = words[_LINES_OFFSET_WORDS:_RING_OFFSET_WORDS]
        ring = np.frombuffer(memory, dtype=np.int64)[_RING_OFFSET_WORDS:]
        self._slots = ring.reshape(_NUM_SLOTS, _SLOT_WORDS)
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._count = 0
        self._fence = MemoryFence()

    @property
    def num_receivers(self) -> int:
        """Every rank but rank 0."""
        return self._size - 1

    def send(self, plan: IntArray) -> None:
        """Copies the plan into the ring; waits only when a rank is 4 slots behind."""
        if self._rank != 0:
            raise ValueError(f"rank {self._rank} cannot send a step plan; only rank 0 does")
        check_plan(plan)
        payload = _SLOT_WORDS - 1
        for start in range(0, max(1, plan.size), payload):
            part = plan[start : start + payload]
            self._wait_for_room()
            slot = self._slots[self._count % _NUM_SLOTS]
            slot[1 : 1 + part.size] = part
            slot[0] = plan.size - start
            self._count += 1
            self._fence()
            self._counts[0] = self._count

    def receive(self, idle: Callable[[], None]) -> IntArray:
        """The next plan; spins, then sleeps longer and longer (see IdleWaiter)."""
        if self._rank == 0:
            raise ValueError("rank 0 sends step plans; only ranks above 0 receive them")
        slot = self._next_slot(idle)
        plan = np.empty(int(slot[0]), dtype=np.int64)
        filled = 0
        while True:
            part = slot[1 : 1 + min(plan.size - filled, _SLOT_WORDS - 1)]
            plan[filled : filled + part.size] = part
            filled += part.size
            self._count += 1
            self._fence()
            self._counts[self._rank * _LINE_WORDS] = self._count
            if filled == plan.size:
                return plan
            slot = self._next_slot(idle)

    def _next_slot(self, idle: Callable[[], None]) -> IntArray:
        waiter = IdleWaiter(idle)
        while self._counts[0] == self._count:
            waiter.wait()
        self._fence()
        slot: IntArray = self._slots[self._count % _NUM_SLOTS]
        return slot

    def _wait_for_room(self) -> None:
        deadline = 0.0
        for rank in range(1, self._size):
            index = rank * _LINE_WORDS
            while self._counts[index] <= self._count - _NUM_SLOTS:
                deadline = deadline or time.monotonic() + self._timeout_s
                if time.monotonic() > deadline:
                    raise RankLostError(
                        f"rank {rank} has not taken a step plan for {self._timeout_s} s"
                    )
                os.sched_yield()


class IdleWaiter:
    """Spins for 2 ms, then sleeps 0.5 ms at a time, and after a second without work 5 ms, so that
    an idle rank takes nothing from its neighbours."""

    def __init__(self, idle: Callable[[], None]) -> None:
        self._idle = idle
        began = time.monotonic()
        self._sleep_after = began + _SPIN_S
        self._doze_after = began + _DOZE_AFTER_S

    def wait(self) -> None:
        """Calls `idle` once, then gives the core away for a moment."""
        self._idle()
        now = time.monotonic()
        if now < self._sleep_after:
            os.sched_yield()
        else:
            time.sleep(_IDLE_SLEEP_S if now < self._doze_after else _DOZE_SLEEP_S)


def check_plan(plan: IntArray) -> None:
    """Raises ValueError unless `plan` is a 1-D int64 array."""
    if plan.ndim != 1 or plan.dtype != np.int64:
        raise ValueError(f"a step plan is 1-D int64, not {plan.ndim}-D {plan.dtype}")


def make_step_channel(
    context: RankContext,
    *,
    timeout_s: float = 30.0,
    start_timeout_s: float = 60.0,
    check: Callable[[], None] = no_check,
) -> StepChannel:
    """The channel of a worker: shared memory when its ranks are on one host, else gloo.

    Every rank calls this and waits for the others; `check` is called while waiting and may raise.
    """
    if context.world_size == 1:
        return SingleStepChannel()
    if context.is_one_host:
        return SharedMemoryStepChannel(
            f"{context.run_id}-steps",
            rank=context.rank,
            size=context.world_size,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            check=check,
        )
    from kvbraid.engine.torch_step_channel import TorchStepChannel

    return TorchStepChannel.connect(context, start_timeout_s)
