"""One rank's KV arrivals and departures, seen from the engine thread.

Arrived frames are scattered into this rank's own pool and computed rows are gathered out of it
here and nowhere else; the transports only move bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvbraid.errors import (
    DataLossError,
    DeadlineError,
    IncompatibleError,
    KVBraidError,
    LeaseLostError,
    UnavailableError,
)
from kvbraid.kv.handoff import KvLayout, RowRun, plan_handoff, ranks_heads
from kvbraid.kv.page_pool import StripedPagePool
from kvbraid.kv.slots import LogicalSlots, slots_of
from kvbraid.transport.frame import FrameHeader
from kvbraid.transport.grants import Grant, GrantTable

logger = logging.getLogger(__name__)

# Bytes moved between two steps: large enough to keep a loopback busy, small enough that a step
# waits for at most a few milliseconds.
_MOVE_BUDGET_BYTES = 8 << 20

_FAILURES: tuple[type[KVBraidError], ...] = (
    LeaseLostError,
    DataLossError,
    UnavailableError,
    IncompatibleError,
    DeadlineError,
)


Scatter = Callable[[FrameHeader, NDArray[np.int32], memoryview], None]
Gather = Callable[[bytes, range, range, NDArray[np.int32]], memoryview]


class RowReceiver(Protocol):
    """What the engine needs of a rank's receiver (kvbraid.transport.receiver)."""

    @property
    def grants(self) -> GrantTable:
        """Grants whose rows are taken."""
        ...

    def poll(self, scatter: Scatter, budget_bytes: int) -> int:
        """Scatter arrived frames, at most about `budget_bytes`; returns the number of bytes."""
        ...

    def rows_landed(self, transfer_id: bytes) -> int:
        """Rows (layer x position x head) in the pool."""
        ...

    def rows_expected(self, transfer_id: bytes) -> int:
        """Rows that this rank gets in all."""
        ...

    def failure(self, transfer_id: bytes) -> KVBraidError | None:
        """Why the transfer cannot complete."""
        ...


class SendStatus(Protocol):
    """What the engine reads of a transfer's status."""

    @property
    def num_rows_total(self) -> int:
        """Rows that this rank sends."""
        ...

    @property
    def num_rows_acked(self) -> int:
        """Rows in the receiving pools."""
        ...

    @property
    def num_bytes(self) -> int:
        """Payload bytes acknowledged."""
        ...

    @property
    def failure(self) -> KVBraidError | None:
        """Why it cannot complete."""
        ...


class RowSender(Protocol):
    """What the engine needs of a rank's sender (kvbraid.transport.sender)."""

    def begin(self, grant: Grant, runs: Sequence[RowRun], num_layers: int, row_bytes: int) -> None:
        """Register a transfer."""
        ...

    def add_positions(self, transfer_id: bytes, end_position: int) -> None:
        """Rows below `end_position` are computed."""
        ...

    def pump(self, gather: Gather, budget_bytes: int) -> int:
        """Fill free room of the outbox; never blocks; returns the number of bytes."""
        ...

    def status(self, transfer_id: bytes) -> SendStatus:
        """Where the transfer stands."""
        ...

    def cancel(self, transfer_id: bytes) -> None:
        """Send nothing more."""
        ...

    def forget(self, transfer_id: bytes) -> None:
        """Drop the record."""
        ...


class TransferProgress(NamedTuple):
    """Where one rank stands with one transfer; travels as four int64.

    is_complete: every row is in the receiving pools. failure: 0, or 1 + index of the error class.
    """

    is_complete: int
    failure: int
    num_rows: int
    num_bytes: int

    def raise_for_failure(self) -> None:
        """Raise the error that the rank met; its own log has the details."""
        if self.failure:
            raise _FAILURES[self.failure - 1]("a KV transfer failed; see the rank's log")


def failure_code(error: KVBraidError | None) -> int:
    """The code of an error in `TransferProgress.failure`; unknown classes count as unavailable."""
    if error is None:
        return 0
    known = [1 + i for i, kind in enumerate(_FAILURES) if isinstance(error, kind)]
    return known[0] if known else 1 + _FAILURES.index(UnavailableError)


def _noted_failure_code(kind: str, transfer_id: bytes, error: KVBraidError | None) -> int:
    """`failure_code`, and a line in this rank's log: only the code reaches rank 0."""
    if error is not None:
        logger.warning("%s transfer %s failed: %s", kind, transfer_id.hex(), error)
    return failure_code(error)


@dataclass(slots=True)
class _Departure:
    transfer_id: bytes
    pages: NDArray[np.int32]


class KvExchange:
    """Binds one rank's pool to its receiver and sender."""

    def __init__(
        self,
        *,
        rank: int,
        layout: KvLayout,
        pool: StripedPagePool,
        receiver: RowReceiver,
        sender: RowSender,
    ) -> None:
        """Raises ValueError for a pool whose rows cannot be moved."""
        pool.spec.check_movable()
        self._rank = rank
        self._layout = layout
        self._pool = pool
        self._heads = ranks_heads(layout, rank)
        self._receiver = receiver
        self._sender = sender
        self._arrivals: dict[bytes, NDArray[np.int32]] = {}
        self._departures: dict[int, _Departure] = {}

    def open_grant(self, grant_json: dict[str, Any], pages: NDArray[np.int32]) -> None:
        """Rows of the grant may land in `pages` from now on."""
        grant = Grant.from_json(grant_json)
        self._arrivals[grant.transfer_id] = pages.copy()
        self._receiver.grants.open(grant)

    def close_grant(self, transfer_id: bytes) -> None:
        """Rows of the transfer are refused from now on; unknown ids are ignored."""
        self._arrivals.pop(transfer_id, None)
        self._receiver.grants.close(transfer_id)

    def begin_send(self, grant_json: dict[str, Any]) -> None:
        """The grant's ranks will get rows; its lease is kept from now on."""
        grant = Grant.from_json(grant_json)
        runs = plan_handoff(self._layout, grant.layout, grant.first_position, grant.end_position)
        self._sender.begin(
            grant,
            [run for run in runs if run.src_rank == self._rank],
            self._layout.num_layers,
            self._pool.spec.row_bytes,
        )

    def bind_send(self, slot: int, transfer_id: bytes, pages: NDArray[np.int32]) -> None:
        """Rows of the sequence in `slot` are the transfer's, sent as they are computed."""
        self._departures[slot] = _Departure(transfer_id, pages.copy())

    def end_send(self, transfer_id: bytes) -> None:
        """Nothing more is sent for the transfer; unknown ids are ignored."""
        self._departures = {
            s: d for s, d in self._departures.items() if d.transfer_id != transfer_id
        }
        self._sender.cancel(transfer_id)
        self._sender.forget(transfer_id)

    def rows_computed(self, slot: int, end_position: int) -> None:
        """KV of positions below `end_position` is in the pool."""
        departure = self._departures.get(slot)
        if departure is not None:
            self._sender.add_positions(departure.transfer_id, end_position)

    def move_rows(self) -> bool:
        """Scatter what arrived, gather what may leave; returns whether anything moved."""
        arrived = self._receiver.poll(self._scatter, _MOVE_BUDGET_BYTES)
        left = self._sender.pump(self._gather, _MOVE_BUDGET_BYTES)
        return bool(arrived or left)

    def progress(self, transfer_id: bytes) -> TransferProgress:
        """This rank's share of an arriving or departing transfer."""
        if transfer_id in self._arrivals:
            self._receiver.grants.expire()
            landed = self._receiver.rows_landed(transfer_id)
            complete = landed >= self._receiver.rows_expected(transfer_id)
            code = _noted_failure_code("arriving", transfer_id, self._receiver.failure(transfer_id))
            num_bytes = landed * self._pool.spec.row_bytes
            return TransferProgress(int(complete), code, landed, num_bytes)
        status = self._sender.status(transfer_id)
        complete = status.num_rows_acked >= status.num_rows_total
        # Whatever keeps the peer from taking rows is no fault of this worker: for the caller the
        # lease is lost, and another attempt is safe.
        lost = status.failure and LeaseLostError(str(status.failure))
        code = _noted_failure_code("departing", transfer_id, lost)
        return TransferProgress(int(complete), code, status.num_rows_acked, status.num_bytes)

    def _scatter(
        self, header: FrameHeader, positions: NDArray[np.int32], payload: memoryview
    ) -> None:
        pages = self._arrivals[header.transfer_id]
        layers = range(header.layer_start, header.layer_start + header.num_layers)
        first = header.head_start - self._heads.start
        heads = range(first, first + header.num_heads)
        packed = self._pool.packed_from_bytes(payload, len(layers), len(heads))
        self._pool.scatter(self._slots(pages, positions), layers, heads, packed)

    def _gather(
        self, transfer_id: bytes, layers: range, heads: range, positions: NDArray[np.int32]
    ) -> memoryview:
        departure = next(d for d in self._departures.values() if d.transfer_id == transfer_id)
        local = range(heads.start - self._heads.start, heads.stop - self._heads.start)
        packed = self._pool.gather(self._slots(departure.pages, positions), layers, local)
        return packed.contiguous().cpu().view(torch.uint8).numpy().reshape(-1).data

    def _slots(self, pages: NDArray[np.int32], positions: NDArray[np.int32]) -> LogicalSlots:
        return slots_of(pages, positions, self._pool.stripe.logical_page_size)
