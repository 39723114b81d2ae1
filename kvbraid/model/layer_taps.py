"""Copies of the residual stream behind chosen layers: what a drafter reads of its target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LayerTaps:
    """The outputs of `layers` (0-based, full residual stream, before any norm) of one forward."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._found: list[Tensor | None] = [None] * len(layers)

    def show(self, layer: int, hidden: Tensor) -> None:
        """The output of `layer`, [T, hidden]; later layers may overwrite it, so it is copied."""
        place = self._places.get(layer)
        if place is not None:
            self._found[place] = hidden.clone()

    def stacked(self) -> Tensor:
        """[T, taps, hidden] in the order asked for. Raises ValueError for a layer never shown."""
        missing = [layer for layer, place in self._places.items() if self._found[place] is None]
        if missing:
            raise ValueError(f"layers {missing} were not shown: the model has fewer")
        return torch.stack([tap for tap in self._found if tap is not None], dim=1)
