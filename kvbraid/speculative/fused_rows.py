"""Fused rows of every token that this worker has computed: what its drafter is told.

Rank 0 alone keeps them, in host memory, under the logical slots of the KV pool: a page that the
prefix cache keeps has its rows with it, and a preempted or retried sequence makes them anew.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.kv_rows import on_device
from kvbraid.kv.slots import LogicalSlots
from kvbraid.speculative.late_fusion import LateFusion

# Memory on the device for rows that wait there: at most so many bytes and rows.
_MOST_BYTES = 64 << 20
_MOST_ROWS = 2048
# Place of a row that does not wait there.
_ON_HOST = -1

Int64Array = NDArray[np.int64]


class RowsInPlace:
    """`FusedRows` to a drafter on the device that makes them."""

    def __init__(self, rows: FusedRows) -> None:
        self.num_missing = rows.num_missing
        self.read = rows.read_in_place


class FusedRows:
    """Rows by logical slot. Used by rank 0's engine thread only. For tokens whose rows are not
    taken there are none: what was held in their slots before has to be forgotten.

    The newest rows wait on the device that made them, until that memory is full or somebody wants
    them in host memory: a step pays for one copy on its device and waits for nothing, and a drafter
    on the same device finds them there. They may wait unfused: many at a time are fused for next to
    nothing, where one step's few would read all of `fc`.
    """

    def __init__(
        self,
        width: int,
        *,
        num_slots: int,
        logical_page_size: int,
        dtype: torch.dtype,
        late: LateFusion | None = None,
    ) -> None:
        """width: numbers of a row. num_slots: of the KV pool, the sink page included. late: what
        fuses rows that `take` gets as taps; unless given, it gets them fused. Memory is touched as
        it is used."""
        self._width = width
        self._late = late
        self._taken_width = width if late is None else late.taps.fused_width
        self._page_size = logical_page_size
        self._dtype = dtype
        # Bytes, for numpy knows no bfloat16. Its copies take one thread: torch's take all cores of
        # the host, and waking those costs more than so few rows do.
        self._rows: NDArray[np.uint8] = np.empty((num_slots, width * dtype.itemsize), np.uint8)
        self._tap_s = 0.0
        self._is_held: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        taken_bytes = self._taken_width * dtype.itemsize
        self._most_waiting = max(1, min(_MOST_ROWS, _MOST_BYTES // taken_bytes))
        self._waiting: Tensor | None = None
        self._num_waiting = 0
        # Slots of those that wait, and the place there of each slot's newest row.
        self._waiting_slots: Int64Array = np.empty(self._most_waiting, dtype=np.int64)
        self._places: Int64Array = np.full(num_slots, _ON_HOST, dtype=np.int64)

    def take(self, slots: LogicalSlots, rows: Tensor) -> None:
        """Keep the rows [T, d] of the tokens in `slots`, one each, fused or not as was said; tokens
        in the sink page are padding. `rows` may be overwritten afterwards, in the order of the
        device's stream."""
        began = time.monotonic()
        for start in range(0, len(slots), self._most_waiting):
            part = slice(start, start + self._most_waiting)
            self._keep_waiting(slots.array[part], rows[part])
        self._is_held[slots.array] = True
        self._is_held[: self._page_size] = False
        self._tap_s += time.monotonic() - began

    def put(self, slots: LogicalSlots, rows: Tensor) -> None:
        """Keep rows [n, d] that another worker has computed for the tokens in `slots`."""
        self._places[slots.array] = _ON_HOST
        self._rows[slots.array] = self._bytes(rows)
        self._is_held[slots.array] = True

    def take_tap_seconds(self) -> float:
        """Seconds that `take` took since the last call of this."""
        seconds, self._tap_s = self._tap_s, 0.0
        return seconds

    def renew(self, pages: Sequence[int]) -> None:
        """These pages have a new owner: what was kept for them is another sequence's."""
        for page in pages:
            self._is_held[page * self._page_size : (page + 1) * self._page_size] = False

    def forget(self, slots: LogicalSlots) -> None:
        """What is held in these slots is of tokens that were not accepted."""
        self._is_held[slots.array] = False

    def num_missing(self, slots: LogicalSlots) -> int:
        """How many of `slots`, in order of position, end with one that has no row here."""
        is_held = self._is_held[slots.array]
        if is_held.all():
            return 0
        return int(np.flatnonzero(~is_held)[-1]) + 1

    def read(self, slots: LogicalSlots) -> Tensor:
        """Their rows, [n, d], a copy in host memory. Every one must be held."""
        if (self._places[slots.array] != _ON_HOST).any():
            self._settle()
        found = torch.empty(len(slots), self._width, dtype=self._dtype)
        np.take(self._rows, slots.array, axis=0, out=found.view(torch.uint8).numpy())
        return found

    def read_in_place(self, slots: LogicalSlots) -> Tensor:
        """As `read`, but on the device where all of them wait there still; valid until the next
        `take`, in the order of the device's stream."""
        places = self._places[slots.array]
        if self._waiting is None or not len(places) or (places == _ON_HOST).any():
            return self.read(slots)
        first, end = int(places[0]), int(places[-1]) + 1
        if end - first == len(places) and (np.diff(places) == 1).all():
            return self._fused(self._waiting[first:end])
        return self._fused(self._waiting.index_select(0, on_device(places, self._waiting.device)))

    def _keep_waiting(self, slots: Int64Array, rows: Tensor) -> None:
        if self._num_waiting + len(slots) > self._most_waiting:
            self._settle()
        if self._waiting is None:
            # Steps run in inference mode, but a tensor made there could be written only there.
            with torch.inference_mode(False):
                shape = (self._most_waiting, self._taken_width)
                self._waiting = rows.new_empty(shape, dtype=self._dtype)
        begin, self._num_waiting = self._num_waiting, self._num_waiting + len(slots)
        self._waiting[begin : self._num_waiting].copy_(rows)
        self._waiting_slots[begin : self._num_waiting] = slots
        self._places[slots] = np.arange(begin, self._num_waiting)

    def _settle(self) -> None:
        """Move all that wait to host memory. Rejected drafts have left rows that the tokens after
        them replaced."""
        if self._waiting is None or not self._num_waiting:
            return
        slots = self._waiting_slots[: self._num_waiting]
        is_newest = self._places[slots] == np.arange(self._num_waiting)
        newest = slots[is_newest]
        self._rows[newest] = self._bytes(self._fused(self._waiting[: self._num_waiting]))[is_newest]
        self._places[newest] = _ON_HOST
        self._num_waiting = 0

    def _fused(self, waiting: Tensor) -> Tensor:
        if self._late is None:
            return waiting
        fusion = self._late.fusion
        with torch.inference_mode():
            return fusion.fuse(waiting.view(len(waiting), len(fusion.tap_layers), -1))

    def _bytes(self, rows: Tensor) -> NDArray[np.uint8]:
        """[n, d] in any place and dtype -> [n, bytes of a row]."""
        kept = rows.to(device="cpu", dtype=self._dtype).contiguous()
        found: NDArray[np.uint8] = kept.view(torch.uint8).numpy()
        return found
