"""Fused rows of every token that this worker has computed: what its drafter is told.

Rank 0 alone keeps them, in host memory, under the logical slots of the KV pool: a page that the
prefix cache keeps has its rows with it, and a preempted or retried sequence makes them anew.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbraid.kv.slots import LogicalSlots

# Most bytes of taps that wait on the device, and most of their rows: what reads rows waits for so
# many to be fused and copied.
_MOST_WAITING_BYTES = 64 << 20
_MOST_WAITING = 2048
_SINK_SLOT = 0


class Fusion(Protocol):
    """What `kvbraid.speculative.tap_fusion.TapFusion` is to its user."""

    @property
    def tap_layers(self) -> Sequence[int]:
        """Target layers whose output it reads."""
        ...

    @property
    def fused_width(self) -> int:
        """Numbers of a fused row."""
        ...

    def fuse(self, taps: Tensor) -> Tensor:
        """[T, taps, d_t] -> [T, d]."""
        ...


class _Taps(NamedTuple):
    """A step's taps [T, m, d_t], not fused yet, and the logical slots [T] of their tokens."""

    slots: NDArray[np.int64]
    taps: Tensor

    def without(self, slots: NDArray[np.int64]) -> _Taps:
        """These, those of `slots` as padding: their pages have had another owner since."""
        is_gone = np.isin(self.slots, slots)
        return self._replace(slots=np.where(is_gone, _SINK_SLOT, self.slots))


class FusedRows:
    """Rows by logical slot. Used by rank 0's engine thread only.

    Taps are fused when rows are read, or many have come: while nothing is drafted, a step pays for
    one copy on its device and waits for nothing.
    """

    def __init__(
        self, fusion: Fusion, *, num_slots: int, logical_page_size: int, dtype: torch.dtype
    ) -> None:
        """num_slots: of the KV pool, the sink page included. Memory is touched as it is used."""
        self._fusion = fusion
        self._page_size = logical_page_size
        self._rows = torch.empty(num_slots, fusion.fused_width, dtype=dtype)
        self._tap_s = 0.0
        self._waiting: list[_Taps] = []
        self._num_waiting = 0
        self._is_held: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)

    @property
    def layers(self) -> Sequence[int]:
        """Target layers to tap."""
        return self._fusion.tap_layers

    def take(self, slots: LogicalSlots, taps: Tensor) -> None:
        """Keep what the taps [T, m, d_t] of the tokens in `slots` are fused to; tokens in the sink
        page are padding. The taps may be overwritten afterwards."""
        began = time.monotonic()
        self._num_waiting += len(taps)
        is_many = self._num_waiting > min(_MOST_WAITING, self._most_rows(taps))
        self._waiting.append(_Taps(slots.array, taps if is_many else taps.clone()))
        self._is_held[slots.array[slots.array >= self._page_size]] = True
        if is_many:
            self._fuse_waiting()
        self._tap_s += time.monotonic() - began

    def put(self, slots: LogicalSlots, rows: Tensor) -> None:
        """Keep rows [n, d] that another worker has computed for the tokens in `slots`."""
        self._waiting = [one.without(slots.array) for one in self._waiting]
        self._rows[torch.from_numpy(slots.array)] = rows.to(device="cpu", dtype=self._rows.dtype)
        self._is_held[slots.array] = True

    def take_tap_seconds(self) -> float:
        """Seconds that `take` took since the last call of this."""
        seconds, self._tap_s = self._tap_s, 0.0
        return seconds

    def renew(self, pages: Sequence[int]) -> None:
        """These pages have a new owner: what was kept for them is another sequence's."""
        for page in pages:
            self._is_held[page * self._page_size : (page + 1) * self._page_size] = False

    def num_missing(self, slots: LogicalSlots) -> int:
        """How many of `slots`, in order of position, end with one that has no row here."""
        missing = np.flatnonzero(~self._is_held[slots.array])
        return int(missing[-1]) + 1 if len(missing) else 0

    def read(self, slots: LogicalSlots) -> Tensor:
        """Their rows, [n, d], a copy. Every one must be held."""
        self._fuse_waiting()
        return self._rows[torch.from_numpy(slots.array)]

    @staticmethod
    def _most_rows(taps: Tensor) -> int:
        """Rows like these that may wait."""
        return _MOST_WAITING_BYTES // (taps[0].nbytes if len(taps) else 1)

    @torch.inference_mode()
    def _fuse_waiting(self) -> None:
        """Put the rows of all taps that wait where they belong."""
        if not self._waiting:
            return
        slots = np.concatenate([one.slots for one in self._waiting])
        taps = [one.taps for one in self._waiting]
        rows = self._fusion.fuse(torch.cat(taps) if len(taps) > 1 else taps[0])
        rows = rows.to(device="cpu", dtype=self._rows.dtype)
        newest = _newest(slots, np.flatnonzero(slots >= self._page_size))
        self._rows[torch.from_numpy(slots[newest])] = rows[torch.from_numpy(newest)]
        self._waiting.clear()
        self._num_waiting = 0


def _newest(slots: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of `rows`, the last one of each slot: rejected drafts left theirs to the tokens after."""
    _, from_end = np.unique(slots[rows][::-1], return_index=True)
    newest: NDArray[np.int64] = rows[len(rows) - 1 - from_end]
    return newest
