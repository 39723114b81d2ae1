"""Fused rows of every token that this worker has computed: what its drafter is told.

Rank 0 alone keeps them, in host memory, under the logical slots of the KV pool: a page that the
prefix cache keeps has its rows with it, and a preempted or retried sequence makes them anew.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbraid.kv.slots import LogicalSlots
from kvbraid.speculative.waiting_taps import Taps, WaitingTaps

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


class FusedRows:
    """Rows by logical slot. Used by rank 0's engine thread only. For tokens whose taps are not
    taken there are none: what was held in their slots before has to be forgotten.

    Taps are fused when rows are read, or many have come: while nothing is drafted, a step pays for
    one copy on its device and waits for nothing.
    """

    def __init__(
        self,
        fusion: Fusion,
        *,
        num_slots: int,
        logical_page_size: int,
        dtype: torch.dtype,
        pads_taps: bool = False,
    ) -> None:
        """num_slots: of the KV pool, the sink page included. Memory is touched as it is used.
        pads_taps: fuse only as many at a time as `waiting_taps.padded_sizes` says, on devices that
        load a kernel for every new size, which takes as long as dozens of steps."""
        self._fusion = fusion
        self._page_size = logical_page_size
        self._dtype = dtype
        # Bytes, for numpy knows no bfloat16. Its copies take one thread: torch's take all cores of
        # the host, and waking those costs more than so few rows do.
        self._rows: NDArray[np.uint8] = np.empty(
            (num_slots, fusion.fused_width * dtype.itemsize), dtype=np.uint8
        )
        self._tap_s = 0.0
        self._waiting = WaitingTaps(_SINK_SLOT, pads=pads_taps)
        self._is_held: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)

    @property
    def layers(self) -> Sequence[int]:
        """Target layers to tap."""
        return self._fusion.tap_layers

    def take(self, slots: LogicalSlots, taps: Tensor) -> None:
        """Keep what the taps [T, m, d_t] of the tokens in `slots` are fused to; tokens in the sink
        page are padding. The taps may be overwritten afterwards."""
        began = time.monotonic()
        for full in self._waiting.add(slots.array, taps):
            self._fuse(full)
        self._is_held[slots.array] = True
        self._is_held[: self._page_size] = False
        self._tap_s += time.monotonic() - began

    def put(self, slots: LogicalSlots, rows: Tensor) -> None:
        """Keep rows [n, d] that another worker has computed for the tokens in `slots`."""
        self._waiting.drop(slots.array)
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
        """Their rows, [n, d], a copy. Every one must be held."""
        if (waiting := self._waiting.drain()) is not None:
            self._fuse(waiting)
        found = torch.empty(len(slots), self._fusion.fused_width, dtype=self._dtype)
        np.take(self._rows, slots.array, axis=0, out=found.view(torch.uint8).numpy())
        return found

    def _bytes(self, rows: Tensor) -> NDArray[np.uint8]:
        """[n, d] in any place and dtype -> [n, bytes of a row]."""
        kept = rows.to(device="cpu", dtype=self._dtype).contiguous()
        found: NDArray[np.uint8] = kept.view(torch.uint8).numpy()
        return found

    @torch.inference_mode()
    def _fuse(self, taken: Taps) -> None:
        newest = taken.newest(self._page_size)
        rows = self._bytes(self._fusion.fuse(taken.taps)[: len(taken.slots)])
        self._rows[taken.slots[newest]] = rows[newest]
