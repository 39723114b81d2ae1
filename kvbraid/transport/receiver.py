"""Takes rows that other workers push to one rank.

Frames arrive on the I/O loop and wait in the staging ring; the engine thread alone takes them out
(`poll`) and writes the pool. So nothing else ever writes it, whatever a peer does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvbraid.errors import DataLossError, KVBraidError
from kvbraid.transport.frame import FrameHead, FrameHeader, is_intact
from kvbraid.transport.grants import GrantTable, RankEndpoint
from kvbraid.transport.inbound import InboundCall, SettledFrame, SlotQueue, StagedFrame
from kvbraid.transport.staging import StagingRing, host_id

Scatter = Callable[[FrameHeader, NDArray[np.int32], memoryview], None]
T = TypeVar("T")


def _nothing() -> None:
    """No engine to wake."""


class KvReceiver:
    """Staged frames of one rank, between the push service (I/O loop) and the engine thread.

    on_landed: called on the I/O loop whenever a frame has been staged.
    """

    def __init__(
        self, *, grants: GrantTable, ring: StagingRing, on_landed: Callable[[], None] = _nothing
    ) -> None:
        self.grants = grants
        self.ring = ring
        self.slots = SlotQueue(ring)
        self.on_landed = on_landed
        self._staged: deque[StagedFrame] = deque()
        self._calls: set[InboundCall] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        grants.on_end(self._grant_ended)

    def endpoint(self, address: str) -> RankEndpoint:
        """Where this rank takes rows, when its push service listens at `address` (host:port)."""
        return RankEndpoint(
            rank=self.grants.rank,
            address=address,
            host_id=host_id(),
            ring_name=self.ring.ring_name,
            ring_slots=self.ring.num_slots,
            slot_bytes=self.ring.slot_bytes,
        )

    # Engine thread

    def poll(self, scatter: Scatter, budget_bytes: int) -> int:
        """Hand staged frames, at most about `budget_bytes`, to `scatter`; returns their bytes.

        scatter(header, positions, payload) writes the rows into the pool; the payload is its
        until it returns. Damaged frames and frames whose grant has ended are refused, and their
        push call fails. Never blocks, and raises only what `scatter` raises.
        """
        num_bytes = 0
        settled: list[SettledFrame] = []
        try:
            while self._staged and num_bytes < budget_bytes:
                staged = self._staged.popleft()
                error = self._admit_rows(staged)
                settled.append(SettledFrame(staged, error))
                header, positions = staged.head
                if error is None:
                    scatter(header, positions, self._payload(staged))
                num_bytes += header.payload_bytes
        finally:
            if settled:
                self._post(self._settle, settled)
        # Rows that wait for us are no sign of a lost sender.
        for staged in tuple(self._staged):
            self.grants.touch(staged.head.header.transfer_id)
        return num_bytes

    def rows_landed(self, transfer_id: bytes) -> int:
        """Rows (layer x position x head) of the transfer in the pool; 0 for unknown ids."""
        return self.grants.rows_landed(transfer_id)

    def rows_expected(self, transfer_id: bytes) -> int:
        """Rows that this rank gets in all; 0 for unknown ids."""
        return self.grants.rows_expected(transfer_id)

    def failure(self, transfer_id: bytes) -> KVBraidError | None:
        """Why the transfer cannot complete; None while it can, and for unknown ids."""
        return self.grants.failure(transfer_id)

    def _admit_rows(self, staged: StagedFrame) -> KVBraidError | None:
        header = staged.head.header
        try:
            if not is_intact(staged.head, self._payload(staged)):
                raise DataLossError(
                    f"frame {header.number} of transfer {header.transfer_id.hex()} is damaged"
                )
            self.grants.record(staged.head)
        except KVBraidError as error:
            self._blame(header, error)
            return error
        return None

    def _payload(self, staged: StagedFrame) -> memoryview:
        return self.ring.view(staged.slot)[: staged.head.header.payload_bytes]

    # I/O loop

    async def supervise(self, call: InboundCall, work: Coroutine[None, None, T]) -> T:
        """Result of `work`, the call's handler, unless the call fails first: then its error."""
        self._loop = asyncio.get_running_loop()
        self._calls.add(call)
        task = self._loop.create_task(work)
        try:
            ends: set[asyncio.Future[Any]] = {task, call.failed}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            # A refused row fails the call although its handler has nothing left to do.
            return call.failed.result() if call.failed.done() else task.result()
        finally:
            self._calls.discard(call)
            call.fail(KVBraidError("the call has ended"))
            call.failed.exception()
            await _cancelled(task)
            # A writer that is still there may write into the slots it holds.
            for slot in call.slots:
                self.slots.replace(slot)
            call.slots.clear()

    def admit(self, call: InboundCall, header: FrameHeader) -> None:
        """Raise unless the frame may be staged; renews the lease."""
        call.belongs_to(header.transfer_id)
        try:
            self.grants.check(header)
            if header.payload_bytes > self.ring.slot_bytes:
                raise DataLossError(
                    f"payload of {header.payload_bytes} bytes exceeds {self.ring.slot_bytes}"
                )
        except DataLossError as error:
            self._blame(header, error)
            raise

    def stage(self, call: InboundCall, head: FrameHead, slot: int) -> None:
        """Leave an admitted frame, its payload in `slot`, to the engine thread."""
        call.num_staged += 1
        self._staged.append(StagedFrame(call, head, slot))
        self.on_landed()

    def _blame(self, header: FrameHeader, error: KVBraidError) -> None:
        """A refused row is lost, and with it the transfer that it truly belongs to."""
        if isinstance(error, DataLossError) and self.grants.is_named_by(header):
            self.grants.fail(header.transfer_id, error)

    def _settle(self, frames: Sequence[SettledFrame]) -> None:
        for frame in frames:
            call = frame.staged.call
            call.num_staged -= 1
            if frame.error is None:
                call.num_rows += frame.staged.head.header.num_rows
            else:
                call.fail(frame.error)
            call.changed.set()
            self.slots.release(frame.staged.slot)

    def _grant_ended(self, transfer_id: bytes, reason: KVBraidError) -> None:
        self._post(self._fail_calls, transfer_id, reason)

    def _fail_calls(self, transfer_id: bytes, reason: KVBraidError) -> None:
        for call in self._calls:
            if call.transfer_id == transfer_id:
                call.fail(reason)

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        if self._loop is None:
            return
        # The loop closes before the engine thread stops; then nobody waits for the answer.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)


async def _cancelled(task: asyncio.Task[T]) -> None:
    """Returns once `task` has ended, cancelling it if need be; its outcome is dropped."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
