"""One push call as its receiver sees it, and the queue of calls that wait for a staging slot.

Everything here belongs to the asyncio loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from kvbraid.errors import DataLossError, KVBraidError
from kvbraid.transport.frame import FrameHead
from kvbraid.transport.staging import StagingRing


class InboundCall:
    """Frames of one transfer from one source rank."""

    def __init__(self) -> None:
        self.transfer_id: bytes | None = None
        self.slots: set[int] = set()
        self.num_slots_wanted = 0
        self.num_staged = 0
        self.num_rows = 0
        self.changed = asyncio.Event()
        self.failed: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

    def belongs_to(self, transfer_id: bytes) -> None:
        """Tie the call to its first frame's transfer. Raises DataLossError for another one's."""
        if self.transfer_id not in (None, transfer_id):
            raise DataLossError(f"a frame of {transfer_id.hex()} came in another transfer's call")
        self.transfer_id = transfer_id

    def fail(self, error: KVBraidError) -> None:
        """End the call with `error`; the first one stays."""
        if not self.failed.done():
            self.failed.set_exception(error)

    async def settled(self) -> None:
        """Returns once every staged frame is in the pool or refused."""
        while self.num_staged:
            self.changed.clear()
            await self.changed.wait()


@dataclass(frozen=True, slots=True, eq=False)
class StagedFrame:
    """A frame whose payload waits in a slot for the engine thread."""

    call: InboundCall
    head: FrameHead
    slot: int


@dataclass(frozen=True, slots=True, eq=False)
class SettledFrame:
    """What became of a staged frame: written when error is None, else refused."""

    staged: StagedFrame
    error: KVBraidError | None


class SlotQueue:
    """Hands free slots to waiting calls, first come first served."""

    def __init__(self, ring: StagingRing) -> None:
        self._ring = ring
        self._waiting: deque[asyncio.Future[int]] = deque()

    async def acquire(self, while_waiting: Callable[[], None], interval_s: float) -> int:
        """A slot, as soon as there is one; `while_waiting` is called every `interval_s`."""
        slot = None if self._waiting else self._ring.acquire()
        if slot is not None:
            return slot
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            while not waiter.done():
                await asyncio.wait({waiter}, timeout=interval_s)
                while_waiting()
            return waiter.result()
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise

    def try_acquire(self) -> int | None:
        """A slot that is free and that nobody waits for."""
        return None if self._waiting else self._ring.acquire()

    def release(self, slot: int) -> None:
        """Give a slot back."""
        self._ring.release(slot)
        self._hand_out()

    def replace(self, slot: int) -> None:
        """Give a slot back whose writer may still write."""
        self._ring.replace(slot)
        self._hand_out()

    def _give_up(self, waiter: asyncio.Future[int]) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        if waiter.done() and not waiter.cancelled():
            self.release(waiter.result())

    def _hand_out(self) -> None:
        while self._waiting and (slot := self._ring.acquire()) is not None:
            self._waiting.popleft().set_result(slot)
