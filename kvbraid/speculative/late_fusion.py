"""Fusion of many steps' taps together, where one step's few rows would read all of `fc`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kvbraid.model.layer_taps import Fusion


class TapsAsRows:
    """Implements `kvbraid.model.layer_taps.Fusion`: a row is its taps, one after the other."""

    def __init__(self, tap_layers: Sequence[int], hidden_size: int) -> None:
        self.tap_layers = tap_layers
        self.fused_width = len(tap_layers) * hidden_size

    def fuse(self, taps: Tensor) -> Tensor:
        """See Fusion."""
        return taps.flatten(1)


class LateFusion(NamedTuple):
    """taps: what the forward pass makes. fusion: what fuses it when the rows are wanted."""

    taps: TapsAsRows
    fusion: Fusion
