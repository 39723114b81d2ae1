"""Copies of the residual stream behind chosen layers: what a drafter reads of its target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Fusion(Protocol):
    """Makes one row a token of its taps; `kvbraid.speculative.tap_fusion.TapFusion`."""

    @property
    def tap_layers(self) -> Sequence[int]:
        """Layers whose output it reads."""
        ...

    @property
    def fused_width(self) -> int:
        """Numbers of a fused row."""
        ...

    def fuse(self, taps: Tensor) -> Tensor:
        """[T, taps, hidden] -> [T, d], which may lie in the memory of the taps."""
        ...


class LayerTaps:
    """The outputs of a fusion's layers (full residual stream, before any norm) of one forward."""

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        self._places = {layer: place for place, layer in enumerate(fusion.tap_layers)}
        self._missing = set(fusion.tap_layers)
        self._rows: Tensor | None = None

    def show(self, layer: int, hidden: Tensor) -> None:
        """The output of `layer`, [T, hidden]; later layers may overwrite it, so it is copied."""
        place = self._places.get(layer)
        if place is None:
            return
        if self._rows is None:
            num_tokens, width = hidden.shape
            self._rows = hidden.new_empty(num_tokens, len(self._places), width)
        self._rows[:, place] = hidden
        self._missing.discard(layer)

    def fused(self) -> Tensor:
        """[T, d]. Raises ValueError for a layer that was never shown."""
        if self._missing or self._rows is None:
            raise ValueError(f"layers {sorted(self._missing)} were not shown: the model has fewer")
        return self._fusion.fuse(self._rows)
