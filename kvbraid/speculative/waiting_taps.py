"""Taps that wait on their device until somebody wants the rows that they are fused to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Memory for them: at most so many bytes and rows. What reads rows waits for so many to be fused.
_MOST_BYTES = 64 << 20
_MOST_ROWS = 2048

Slots = NDArray[np.int64]


class Taps(NamedTuple):
    """taps [T, m, d_t] of the tokens in the logical slots [T]."""

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

    def __init__(self, padding_slot: int) -> None:
        """padding_slot: stands for tokens whose row nobody wants."""
        self._padding_slot = padding_slot
        self._memory: Tensor | None = None
        self._slots: list[Slots] = []
        self._num_rows = 0
        self._dropped: list[tuple[int, Slots]] = []

    def has_room(self, taps: Tensor) -> bool:
        """Whether `add` takes them before the next `drain`."""
        memory = self._memory_for(taps)
        return self._num_rows + len(taps) <= len(memory)

    def add(self, slots: Slots, taps: Tensor) -> None:
        """Keeps a copy of the taps, and the slots themselves. There must be room."""
        begin, self._num_rows = self._num_rows, self._num_rows + len(taps)
        self._memory_for(taps)[begin : self._num_rows].copy_(taps)
        self._slots.append(slots)

    def drop(self, slots: Slots) -> None:
        """What waits for these slots is no longer wanted; what is added later is."""
        if self._num_rows:
            self._dropped.append((self._num_rows, slots))

    def drain(self) -> Taps | None:
        """All that wait, valid until the next `add`; None when nothing does."""
        if not self._num_rows:
            return None
        assert self._memory is not None
        slots = np.concatenate(self._slots)
        for end, dropped in self._dropped:
            slots[:end][np.isin(slots[:end], dropped)] = self._padding_slot
        taps = Taps(slots, self._memory[: self._num_rows])
        self._slots, self._num_rows, self._dropped = [], 0, []
        return taps

    def _memory_for(self, taps: Tensor) -> Tensor:
        if self._memory is None:
            row_bytes = taps.shape[1:].numel() * taps.element_size()
            num_rows = min(_MOST_ROWS, _MOST_BYTES // row_bytes)
            # Steps run in inference mode, but a tensor made there could be written only there.
            with torch.inference_mode(False):
                self._memory = taps.new_empty(num_rows, *taps.shape[1:])
        return self._memory
