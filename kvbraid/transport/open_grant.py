"""One grant as one rank sees it: which rows it takes and which of them are in the pool."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvbraid.errors import DataLossError, KVBraidError
from kvbraid.kv.kv_layout import ranks_heads
from kvbraid.kv.slots import local_indices, owners_of
from kvbraid.transport.frame import FrameHead, FrameHeader
from kvbraid.transport.grant import Grant

RowIndex = tuple[slice, slice | NDArray[np.int64], slice]


class OpenGrant:
    """Rows of `grant` that rank `rank` gets. Not thread-safe: `GrantTable` locks."""

    def __init__(self, grant: Grant, rank: int, now: float) -> None:
        self.grant = grant
        self.touched = now
        self.failure: KVBraidError | None = None
        self.num_landed = 0
        self._rank = rank
        self._heads = ranks_heads(grant.layout, rank)
        self._stripe = grant.layout.stripe(rank)
        self._first_index = self._stripe.local_length(grant.first_position)
        num_positions = self._stripe.local_count(grant.first_position, grant.end_position)
        # True where the row is in the pool: one byte a row of some hundred.
        self._landed = np.zeros(
            (grant.layout.num_layers, num_positions, len(self._heads)), dtype=np.bool_
        )

    @property
    def num_expected(self) -> int:
        """Rows (layer x position x head) that the rank gets in all."""
        return self._landed.size

    @property
    def is_complete(self) -> bool:
        """Whether every row is in the pool."""
        return self.num_landed == self.num_expected

    def record(self, head: FrameHead, now: float) -> None:
        """Count the frame's rows as landed and renew the lease. Raises DataLossError, and counts
        nothing, when they may not be written: see `check`; not owned, outside the grant's
        positions, or in the pool already."""
        self.check(head.header)
        where = self._rows_of(head)
        if self._landed[where].any():
            raise DataLossError(f"frame {head.header.number} repeats rows of {self._name}")
        self._landed[where] = True
        self.num_landed += head.header.num_rows
        self.touched = now

    @property
    def _name(self) -> str:
        return f"transfer {self.grant.transfer_id.hex()}"

    def check(self, header: FrameHeader) -> None:
        """Raise DataLossError for another generation or rank, layers or heads that the rank does
        not get, or a payload of another size."""
        layout = self.grant.layout
        if header.generation != self.grant.generation:
            raise DataLossError(
                f"{self._name} has generation {self.grant.generation}, "
                f"frame {header.number} has {header.generation}"
            )
        if header.dst_rank != self._rank:
            raise DataLossError(f"frame for rank {header.dst_rank} arrived at rank {self._rank}")
        if header.layer_start + header.num_layers > layout.num_layers:
            raise DataLossError(
                f"layers {header.layer_start} + {header.num_layers} exceed {layout.num_layers}"
            )
        first, stop = header.head_start, header.head_start + header.num_heads
        if header.num_rows and not self._heads.start <= first <= stop <= self._heads.stop:
            raise DataLossError(
                f"heads {first}..{stop} are not among {self._heads} of rank {self._rank}"
            )
        if header.payload_bytes != header.num_rows * layout.row_bytes:
            raise DataLossError(
                f"{header.num_rows} rows of {layout.row_bytes} bytes "
                f"are not {header.payload_bytes} bytes"
            )

    def _rows_of(self, head: FrameHead) -> RowIndex:
        """The frame's rows as an index into `_landed`: slices wherever they can be, which is the
        common case and much faster."""
        header, positions = head
        first_head = header.head_start - self._heads.start
        layers = slice(header.layer_start, header.layer_start + header.num_layers)
        heads = slice(first_head, first_head + header.num_heads)
        if not len(positions):
            return layers, slice(0), heads
        self._check_positions(positions)
        local = local_indices(self._stripe, positions) - self._first_index
        first, last = int(local[0]), int(local[-1])
        if last - first == len(local) - 1:
            return layers, slice(first, last + 1), heads
        return layers, local, heads

    def _check_positions(self, positions: NDArray[np.int32]) -> None:
        start, end = self.grant.first_position, self.grant.end_position
        low, high = int(positions[0]), int(positions[-1])
        if (positions[1:] <= positions[:-1]).any():
            raise DataLossError(f"positions {low}..{high} are not ascending")
        if low < start or high >= end:
            raise DataLossError(f"positions {low}..{high} are outside [{start}, {end})")
        if (owners_of(self._stripe, positions) != self._stripe.dcp_rank).any():
            raise DataLossError(f"positions {low}..{high} are not all owned by rank {self._rank}")
