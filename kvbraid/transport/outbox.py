"""Rows on their way out: what is left to cut into frames, and frames that wait for the network.

The engine thread cuts and queues; the I/O loop takes and acknowledges. The sender's lock guards
what both touch.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbraid.errors import IncompatibleError, KVBraidError
from kvbraid.kv.handoff import RowRun
from kvbraid.transport.frame import FrameHeader
from kvbraid.transport.grant import Grant, RankEndpoint


class SendStatus(NamedTuple):
    """Where a transfer stands on this source rank.

    Rows count layer x position x head. num_rows_acked: rows in the receiving pools. num_bytes:
    their payload bytes. seconds: from the first frame to the last acknowledgement, or to now.
    """

    num_rows_total: int
    num_rows_acked: int
    num_bytes: int
    seconds: float
    failure: KVBraidError | None

    @property
    def is_complete(self) -> bool:
        """Whether every row is in the receiving pools."""
        return self.failure is None and self.num_rows_acked == self.num_rows_total


class Piece(NamedTuple):
    """Rows of one frame. heads: global. positions: int32 [n]."""

    layers: range
    heads: range
    positions: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class OutFrame:
    """A frame to push; the header's checksum is still to be made."""

    header: FrameHeader
    positions: NDArray[np.int32]
    payload: memoryview | bytes


class RunCursor:
    """Cuts one run into frames of at most `slot_bytes`, in the order of positions.

    Raises IncompatibleError when not even one position of one layer fits.
    """

    def __init__(self, run: RowRun, num_layers: int, row_bytes: int, slot_bytes: int) -> None:
        layer_bytes = len(run.heads) * row_bytes
        if layer_bytes > slot_bytes:
            raise IncompatibleError(
                f"a position of {layer_bytes} bytes does not fit in a slot of {slot_bytes}"
            )
        self._run = run
        self._num_layers = num_layers
        self._layers_per_frame = min(num_layers, slot_bytes // layer_bytes)
        self._positions_per_frame = slot_bytes // (layer_bytes * self._layers_per_frame)
        self._index = 0
        self._layer = 0

    @property
    def num_rows(self) -> int:
        """Rows of the run: layer x position x head."""
        return self._num_layers * len(self._run.positions) * len(self._run.heads)

    def next_piece(self, end_position: int) -> Piece | None:
        """The next frame's rows among positions below `end_position`; None when all are cut."""
        positions = self._run.positions
        stop = min(
            int(np.searchsorted(positions, end_position)), self._index + self._positions_per_frame
        )
        if stop <= self._index:
            return None
        layers = range(self._layer, min(self._layer + self._layers_per_frame, self._num_layers))
        piece = Piece(layers, self._run.heads, positions[self._index : stop])
        self._layer = layers.stop % self._num_layers
        if self._layer == 0:
            self._index = stop
        return piece


class Lane:
    """Everything that one transfer sends from this rank to one destination rank."""

    def __init__(self, endpoint: RankEndpoint, cursors: Sequence[RunCursor]) -> None:
        self.endpoint = endpoint
        self.queued: deque[OutFrame] = deque()
        self.num_rows_total = sum(cursor.num_rows for cursor in cursors)
        self.num_rows_sent = 0
        self.num_rows_acked = 0
        self._cursors = deque(cursors)
        self._next_number = 0
        self.wake = asyncio.Event()

    def next_piece(self, end_position: int) -> Piece | None:
        """The next frame's rows; runs of different heads take turns, so positions stay close."""
        for _ in range(len(self._cursors)):
            piece = self._cursors[0].next_piece(end_position)
            self._cursors.rotate(-1)
            if piece is not None:
                return piece
        return None

    def queue(self, grant: Grant, src_rank: int, piece: Piece, payload: memoryview) -> None:
        """Number the frame and leave it to the I/O loop. payload: flat bytes."""
        header = self._header(grant, src_rank, piece, payload.nbytes)
        self._next_number += 1
        self.queued.append(OutFrame(header, piece.positions, payload))

    def heartbeat(self, grant: Grant, src_rank: int) -> OutFrame:
        """A frame without rows, which renews the lease."""
        nothing = Piece(range(0), range(0), np.empty(0, np.int32))
        return OutFrame(self._header(grant, src_rank, nothing, 0), nothing.positions, b"")

    def _header(self, grant: Grant, src_rank: int, piece: Piece, payload_bytes: int) -> FrameHeader:
        return FrameHeader(
            src_rank=src_rank,
            dst_rank=self.endpoint.rank,
            transfer_id=grant.transfer_id,
            incarnation=grant.incarnation,
            generation=grant.generation,
            number=self._next_number,
            layer_start=piece.layers.start,
            num_layers=len(piece.layers),
            head_start=piece.heads.start,
            num_heads=len(piece.heads),
            num_positions=len(piece.positions),
            payload_bytes=payload_bytes,
        )


class OutboundTransfer:
    """One transfer's lanes and progress on this source rank."""

    def __init__(self, grant: Grant, row_bytes: int, lanes: Sequence[Lane]) -> None:
        self.grant = grant
        self.lanes = lanes
        self.end_position = grant.first_position
        self.failure: KVBraidError | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.started_at: float | None = None
        self.ended_at: float | None = None
        self._row_bytes = row_bytes

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be sent."""
        return self.failure is not None or all(
            lane.num_rows_acked == lane.num_rows_total for lane in self.lanes
        )

    def status(self) -> SendStatus:
        """See SendStatus."""
        acked = sum(lane.num_rows_acked for lane in self.lanes)
        start = self.started_at
        end = self.ended_at if self.ended_at is not None else time.monotonic()
        return SendStatus(
            num_rows_total=sum(lane.num_rows_total for lane in self.lanes),
            num_rows_acked=acked,
            num_bytes=acked * self._row_bytes,
            seconds=0.0 if start is None else end - start,
            failure=self.failure,
        )
