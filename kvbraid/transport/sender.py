"""Pushes rows of one source rank to the ranks of other workers, while they are computed.

The engine thread hands rows over without ever waiting (`begin`, `add_positions`, `pump`); the I/O
loop pushes them. The outbox between them is bounded: a slow receiver slows its own transfers, and
costs no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvbraid.errors import (
    DataLossError,
    IncompatibleError,
    KVBraidError,
    LeaseLostError,
    RequestCancelledError,
    UnavailableError,
)
from kvbraid.kv.handoff import RowRun
from kvbraid.transport.grant import Grant
from kvbraid.transport.grpc_push import ChannelFactory, GrpcPushMover
from kvbraid.transport.mover import Mover, MoverChoice, PushCall, choose_mover
from kvbraid.transport.outbox import Lane, OutboundTransfer, RunCursor, SendStatus
from kvbraid.transport.shared_memory import SharedMemoryMover
from kvbraid.transport.staging import host_id

Gather = Callable[[bytes, range, range, NDArray[np.int32]], memoryview | bytes]

# Frames of one lane that wait for the network.
_LANE_FRAMES = 8
# A transfer begins when its prompt is queued and may wait as long as its request may, which is
# bounded where that is known: whoever asked for the prompt cancels it.
_LONGEST_S = 24 * 3600.0


class KvSender:
    """Transfers that leave one rank.

    channels: the channel to an address; its owner closes it. max_outbox_bytes: payload that may
    wait for the network, over all transfers. max_frame_bytes: payload of a frame, whatever its slot
    has room for. timeout_s: no transfer lasts longer.
    Methods are for the engine thread, `start` and `stop` for the I/O loop.
    """

    def __init__(
        self,
        *,
        rank: int,
        channels: ChannelFactory,
        mover_choice: MoverChoice = "auto",
        max_outbox_bytes: int = 32 << 20,
        max_frame_bytes: int = 1 << 31,
        timeout_s: float = _LONGEST_S,
    ) -> None:
        self._rank = rank
        self._choice: MoverChoice = mover_choice
        self._max_outbox_bytes = max_outbox_bytes
        self._max_frame_bytes = max_frame_bytes
        self._timeout_s = timeout_s
        self._host_id = host_id()
        self._movers: dict[str, Mover] = {
            mover.name: mover for mover in (GrpcPushMover(channels), SharedMemoryMover(channels))
        }
        self._transfers: dict[bytes, OutboundTransfer] = {}
        self._lock = threading.Lock()
        self._outbox_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    # I/O loop

    async def start(self) -> None:
        """Push from the running loop. Transfers begun before start now."""
        self._loop = asyncio.get_running_loop()
        for transfer in list(self._transfers.values()):
            self._start_lanes(transfer)

    async def stop(self) -> None:
        """Give every transfer up."""
        for transfer in list(self._transfers.values()):
            self._end(transfer, RequestCancelledError("the sender stopped"))
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._loop = None

    # Engine thread

    def begin(self, grant: Grant, runs: Sequence[RowRun], num_layers: int, row_bytes: int) -> None:
        """Register a transfer: `runs` of this rank, of which no row is computed yet.

        A grant that cannot be served fails the transfer, see `status`; ValueError is only for a
        transfer id that is in use or runs of other ranks.
        """
        if grant.transfer_id in self._transfers:
            raise ValueError(f"transfer {grant.transfer_id.hex()} has begun already")
        foreign = [run.src_rank for run in runs if run.src_rank != self._rank]
        if foreign:
            raise ValueError(f"runs of rank {foreign[0]} given to the sender of rank {self._rank}")
        failure: KVBraidError | None = None
        try:
            lanes = _lanes(grant, runs, num_layers, row_bytes, self._max_frame_bytes)
        except IncompatibleError as error:
            lanes, failure = [], error
        transfer = OutboundTransfer(grant, row_bytes, lanes)
        transfer.failure = failure
        self._transfers[grant.transfer_id] = transfer
        self._post(self._start_lanes, transfer)

    def add_positions(self, transfer_id: bytes, end_position: int) -> None:
        """Rows of positions below `end_position` are in the pool now. Idempotent; unknown ids
        are ignored."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            transfer.end_position = max(transfer.end_position, end_position)

    def pump(self, gather: Gather, budget_bytes: int) -> int:
        """Fill free room of the outbox with computed rows, at most about `budget_bytes`; returns
        the bytes gathered. Never blocks.

        gather(transfer_id, layers, heads, positions) returns the rows' bytes in the order
        [layers, positions, heads], heads being global ids; they must not change afterwards.
        """
        num_bytes = 0
        progress = True
        while progress and num_bytes < budget_bytes:
            progress = False
            for transfer in list(self._transfers.values()):
                for lane in transfer.lanes:
                    moved = self._fill(transfer, lane, gather)
                    num_bytes += moved
                    progress = progress or moved > 0
                    if num_bytes >= budget_bytes:
                        return num_bytes
        return num_bytes

    def status(self, transfer_id: bytes) -> SendStatus:
        """Where the transfer stands; an unknown id has failed."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            unknown = LeaseLostError(f"transfer {transfer_id.hex()} is not known here")
            return SendStatus(0, 0, 0, 0.0, unknown)
        return transfer.status()

    def cancel(self, transfer_id: bytes) -> None:
        """Send nothing more of the transfer; unknown ids are ignored."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and not transfer.is_over:
            transfer.failure = RequestCancelledError(f"transfer {transfer_id.hex()} was cancelled")
            self._post(self._end, transfer, transfer.failure)

    def forget(self, transfer_id: bytes) -> None:
        """Drop the record, cancelling what is left; unknown ids are ignored."""
        self.cancel(transfer_id)
        self._transfers.pop(transfer_id, None)

    def _fill(self, transfer: OutboundTransfer, lane: Lane, gather: Gather) -> int:
        """Queue one frame of the lane if there is room for it; returns its bytes."""
        with self._lock:
            has_room = (
                transfer.failure is None
                and len(lane.queued) < _LANE_FRAMES
                # One frame always fits, whatever a peer's slots are.
                and (
                    self._outbox_bytes + lane.endpoint.slot_bytes <= self._max_outbox_bytes
                    or self._outbox_bytes == 0
                )
            )
        piece = lane.next_piece(transfer.end_position) if has_room else None
        if piece is None:
            return 0
        grant = transfer.grant
        rows = gather(grant.transfer_id, piece.layers, piece.heads, piece.positions)
        payload = memoryview(rows).cast("B")
        with self._lock:
            if transfer.failure is not None:
                return 0
            lane.queue(grant, self._rank, piece, payload)
            self._outbox_bytes += payload.nbytes
            if transfer.started_at is None:
                transfer.started_at = time.monotonic()
        self._post(lane.wake.set)
        return payload.nbytes

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        if self._loop is None:
            # Not started yet, or stopped: no other thread is in the way.
            callback(*arguments)
            return
        # The loop closes before the engine thread stops; then nobody is left to push.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    # I/O loop

    def _start_lanes(self, transfer: OutboundTransfer) -> None:
        if self._loop is None or transfer.tasks or transfer.failure is not None:
            return
        for lane in transfer.lanes:
            task = self._loop.create_task(self._run_lane(transfer, lane))
            transfer.tasks.add(task)
            self._tasks.add(task)
            task.add_done_callback(partial(self._lane_ended, transfer))

    def _lane_ended(self, transfer: OutboundTransfer, task: asyncio.Task[None]) -> None:
        """Whatever ended a lane early ends its transfer: a lost row must not leave a request
        waiting."""
        self._tasks.discard(task)
        if task.cancelled():
            self._end(transfer, UnavailableError("the channel was closed"))
        elif (error := task.exception()) is not None:
            known = error if isinstance(error, KVBraidError) else UnavailableError(repr(error))
            self._end(transfer, known)
        elif transfer.is_over:
            transfer.ended_at = time.monotonic()

    def _end(self, transfer: OutboundTransfer, failure: KVBraidError) -> None:
        with self._lock:
            if not transfer.is_over:
                transfer.failure = failure
            if transfer.failure is None:
                return
            transfer.ended_at = transfer.ended_at or time.monotonic()
            for task in transfer.tasks:
                task.cancel()
            for lane in transfer.lanes:
                self._outbox_bytes -= sum(f.header.payload_bytes for f in lane.queued)
                lane.queued.clear()

    async def _run_lane(self, transfer: OutboundTransfer, lane: Lane) -> None:
        mover = self._movers[choose_mover(self._choice, lane.endpoint, self._host_id)]
        call = mover.open(lane.endpoint, timeout_s=self._timeout_s, on_event=lane.wake.set)
        try:
            await call.send(lane.heartbeat(transfer.grant, self._rank))
            await self._push(transfer, lane, call)
            await call.finish()
            lane.num_rows_acked = call.num_rows_acked
        finally:
            await call.cancel()
        if lane.num_rows_acked != lane.num_rows_total:
            raise DataLossError(
                f"{lane.endpoint.address} wrote {lane.num_rows_acked} of {lane.num_rows_total} rows"
            )

    async def _push(self, transfer: OutboundTransfer, lane: Lane, call: PushCall) -> None:
        heartbeat_s = transfer.grant.lease_ms / 3000
        while lane.num_rows_sent < lane.num_rows_total:
            lane.wake.clear()
            lane.num_rows_acked = call.num_rows_acked
            if call.has_ended:
                return
            if lane.queued:
                await self._push_first(lane, call)
                continue
            try:
                async with asyncio.timeout(heartbeat_s):
                    await lane.wake.wait()
            except TimeoutError:
                await call.send(lane.heartbeat(transfer.grant, self._rank))

    async def _push_first(self, lane: Lane, call: PushCall) -> None:
        frame = lane.queued[0]
        await call.send(frame)
        with self._lock:
            lane.queued.popleft()
            self._outbox_bytes -= frame.header.payload_bytes
        lane.num_rows_sent += frame.header.num_rows


def _lanes(
    grant: Grant, runs: Sequence[RowRun], num_layers: int, row_bytes: int, max_frame_bytes: int
) -> list[Lane]:
    cursors: dict[int, list[RunCursor]] = {}
    for run in runs:
        frame_bytes = min(grant.endpoints[run.dst_rank].slot_bytes, max_frame_bytes)
        cursor = RunCursor(run, num_layers, row_bytes, frame_bytes)
        cursors.setdefault(run.dst_rank, []).append(cursor)
    return [Lane(grant.endpoints[rank], found) for rank, found in sorted(cursors.items())]
