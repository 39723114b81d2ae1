"""Two index spaces of the KV pool as two types, so that a mix-up is an error and not garbage.

A logical slot is shared by all ranks of a DCP group (capacity C * c, page P * c). A physical row
is one rank's (capacity C, page P). Only `page_pool` turns the first into the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from attention.layout import StripeLayout

IntArray = NDArray[np.int64] | NDArray[np.int32]


def _as_ids(array: IntArray, kind: str) -> NDArray[np.int64]:
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        shape = getattr(array, "shape", None)
        raise TypeError(f"{kind} take a 1-D integer numpy array, got {type(array)} shape {shape}")
    return array.astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True, eq=False)
class LogicalSlots:
    """Slots of the widened space. array: int64 [num_tokens]."""

    array: NDArray[np.int64]

    def __post_init__(self) -> None:
        object.__setattr__(self, "array", _as_ids(self.array, "LogicalSlots"))

    def __len__(self) -> int:
        return len(self.array)


@dataclass(frozen=True, slots=True, eq=False)
class PhysicalRows:
    """Rows of one rank's pool. array: int64 [num_rows]."""

    array: NDArray[np.int64]

    def __post_init__(self) -> None:
        object.__setattr__(self, "array", _as_ids(self.array, "PhysicalRows"))

    def __len__(self) -> int:
        return len(self.array)


def slots_of(
    page_table_row: Sequence[int] | IntArray, positions: IntArray, logical_page_size: int
) -> LogicalSlots:
    """Logical slots of a sequence's `positions` (1-D, >= 0).

    page_table_row: the sequence's logical pages in order; entries that no position reaches are
    not read. Raises ValueError when a position lies outside the table.
    """
    table = np.asarray(page_table_row, dtype=np.int64)
    ids = _as_ids(positions, "positions")
    limit = len(table) * logical_page_size
    if len(ids) and (ids.min() < 0 or ids.max() >= limit):
        raise ValueError(
            f"positions {ids.min()}..{ids.max()} are outside [0, {limit}), "
            f"{len(table)} pages of {logical_page_size} tokens"
        )
    pages, offsets = np.divmod(ids, logical_page_size)
    return LogicalSlots(table[pages] * logical_page_size + offsets)


def slots_between(
    pages: Sequence[int], first: int, end: int, logical_page_size: int
) -> LogicalSlots:
    """Logical slots of positions [first, end) of a sequence with these logical pages, in order.

    Takes as long as the range is, not the sequence. Raises ValueError when it leaves the pages.
    """
    if not 0 <= first <= end <= len(pages) * logical_page_size:
        raise ValueError(
            f"positions [{first}, {end}) are outside of {len(pages)} pages of {logical_page_size}"
        )
    first_page = first // logical_page_size
    used = np.array(pages[first_page : -(-end // logical_page_size)], dtype=np.int64)
    positions = np.arange(first, end)
    offsets = positions % logical_page_size
    return LogicalSlots(
        used[positions // logical_page_size - first_page] * logical_page_size + offsets
    )


def slots_of_tokens(
    page_table: IntArray, sequence_rows: IntArray, positions: IntArray, logical_page_size: int
) -> LogicalSlots:
    """Logical slots of a step's tokens.

    page_table: [num_seqs, max_pages] logical pages. sequence_rows, positions: [T]; token t is at
    positions[t] of the sequence in page_table[sequence_rows[t]].
    """
    pages = page_table[sequence_rows, positions // logical_page_size]
    return LogicalSlots(pages.astype(np.int64) * logical_page_size + positions % logical_page_size)


def owners_of(stripe: StripeLayout, positions: IntArray) -> NDArray[np.int64]:
    """`stripe.owner`, element by element. Works on positions and on logical slots alike."""
    # The owner rule is integer arithmetic, so it also holds for arrays; its signature says int.
    return cast("NDArray[np.int64]", stripe.owner(cast("int", positions)))


def local_indices(stripe: StripeLayout, positions: IntArray) -> NDArray[np.int64]:
    """`stripe.row`, element by element: rows of owned logical slots, or, for owned positions,
    how many positions of the sequence this rank owns before each."""
    return cast("NDArray[np.int64]", stripe.row(cast("int", positions)))
