"""Taps that wait on their device until somebody wants the rows that they are fused to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbraid.model.graph_capture import graph_size

# Memory for them: at most so many bytes and rows. What reads rows waits for so many to be fused.
_MOST_BYTES = 64 << 20
_MOST_ROWS = 2048

Slots = NDArray[np.int64]


def most_waiting(tap_shape: Sequence[int], dtype: torch.dtype) -> int:
    """Rows of taps of this shape, [m, d_t], that may wait at a time."""
    return max(1, min(_MOST_ROWS, _MOST_BYTES // (math.prod(tap_shape) * dtype.itemsize)))


def padded_sizes(tap_shape: Sequence[int], dtype: torch.dtype) -> list[int]:
    """Every number of rows that a padding `WaitingTaps.drain` gives."""
    most = most_waiting(tap_shape, dtype)
    return sorted({graph_size(number, most) for number in range(1, most + 1)})


class Taps(NamedTuple):
    """taps [P, m, d_t], of which the first T are those of the tokens in the logical slots [T]."""

    slots: Slots
    taps: Tensor

    def newest(self, first_slot: int) -> NDArray[np.int64]:
        """Indices of the last one of each slot from first_slot on: rejected drafts left theirs to
        the tokens after."""
        rows = np.flatnonzero(self.slots >= first_slot)
        _, from_end = np.unique(self.slots[rows][::-1], return_index=True)
        newest: NDArray[np.int64] = rows[len(rows) - 1 - from_end]
        return newest


class WaitingTaps:
    """In the order of their steps, in memory that is taken once: a step costs one small copy."""

    def __init__(self, padding_slot: int, *, pads: bool) -> None:
        """padding_slot: stands for tokens whose row nobody wants. pads: see `drain`."""
        self._padding_slot = padding_slot
        self._pads = pads
        self._memory: Tensor | None = None
        self._slots: list[Slots] = []
        self._num_rows = 0
        self._dropped: list[tuple[int, Slots]] = []

    def add(self, slots: Slots, taps: Tensor) -> Iterator[Taps]:
        """Keeps a copy of the taps, and the slots themselves. Yields what waits whenever there is
        no room for more; to be run to its end."""
        memory = self._memory_for(taps)
        while len(slots):
            num_taken = min(len(slots), len(memory) - self._num_rows)
            if num_taken < len(slots) and (full := self.drain()) is not None:
                yield full
                num_taken = min(len(slots), len(memory))
            begin, self._num_rows = self._num_rows, self._num_rows + num_taken
            memory[begin : self._num_rows].copy_(taps[:num_taken])
            self._slots.append(slots[:num_taken])
            slots, taps = slots[num_taken:], taps[num_taken:]

    def drop(self, slots: Slots) -> None:
        """What waits for these slots is no longer wanted; what is added later is."""
        if self._num_rows:
            self._dropped.append((self._num_rows, slots))

    def drain(self) -> Taps | None:
        """All that wait, valid until the next `add`; None where nothing does. Padded, there are
        rows of anything behind them, so that their number is one of a few."""
        if not self._num_rows:
            return None
        assert self._memory is not None
        slots = np.concatenate(self._slots)
        for end, dropped in self._dropped:
            slots[:end][np.isin(slots[:end], dropped)] = self._padding_slot
        size = self._num_rows
        if self._pads:
            size = graph_size(size, len(self._memory))
        self._slots, self._num_rows, self._dropped = [], 0, []
        return Taps(slots, self._memory[:size])

    def _memory_for(self, taps: Tensor) -> Tensor:
        if self._memory is None:
            num_rows = most_waiting(taps.shape[1:], taps.dtype)
            # Steps run in inference mode, but a tensor made there could be written only there.
            with torch.inference_mode(False):
                self._memory = taps.new_empty(num_rows, *taps.shape[1:])
        return self._memory
