"""Fusion in pieces of few sizes, for devices that load a kernel for every new size of a product,
which takes as long as dozens of decode steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbraid.model.graph_capture import graph_size
from kvbraid.model.layer_taps import Fusion

_MOST_ROWS = 2048

# Every number of rows that is fused at a time.
PADDED_SIZES = tuple(1 << i for i in range(_MOST_ROWS.bit_length()))


class PaddedFusion:
    """Implements `kvbraid.model.layer_taps.Fusion`. Padding is rows of anything, and dropped."""

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion

    @property
    def tap_layers(self) -> Sequence[int]:
        """See Fusion."""
        return self._fusion.tap_layers

    @property
    def fused_width(self) -> int:
        """See Fusion."""
        return self._fusion.fused_width

    def fuse(self, taps: Tensor) -> Tensor:
        """See Fusion."""
        pieces = [self._fused(piece) for piece in torch.split(taps, _MOST_ROWS)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _fused(self, taps: Tensor) -> Tensor:
        size = graph_size(len(taps), _MOST_ROWS)
        if size == len(taps):
            return self._fusion.fuse(taps)
        padded = taps.new_empty(size, *taps.shape[1:])
        padded[: len(taps)] = taps
        return self._fusion.fuse(padded)[: len(taps)]
