"""The part of a drafter that runs at its target: tapped layers in, one fused row a token out.

T tokens, m taps, d_t target width, d draft width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvbraid.model.config import ModelConfig
from kvbraid.model.layers import Projection, load_norm
from kvbraid.model.rms_norm import rms_norm
from kvbraid.model.weight_reader import WeightReader
from kvbraid.speculative.drafter_config import AnyDrafterConfig, DrafterConfig, Eagle3Config
from kvbraid.speculative.drafter_source import open_drafter


class TapFusion:
    """EAGLE3: fc(taps), with its norms before; DSpark: hidden_norm(fc(taps))."""

    def __init__(
        self,
        config: DrafterConfig,
        fc: Projection,
        *,
        before: Sequence[Callable[[Tensor], Tensor]] = (),
        after: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """before: applied to the taps [T, m, d_t] in turn; after: to the fused rows [T, d]."""
        self.tap_layers = config.tap_layers
        self.fused_width = config.fused_width
        self.tap_shape = (len(config.tap_layers), config.target_hidden_size)
        self._before = tuple(before)
        self._fc = fc
        self._after = after

    @torch.inference_mode()
    def fuse(self, taps: Tensor) -> Tensor:
        """taps [T, m, d_t]: the residual stream after each tapped layer, before any norm, in the
        order of `tap_layers` -> [T, d]. Raises ValueError for another shape."""
        if taps.shape[1:] != self.tap_shape:
            raise ValueError(f"taps {tuple(taps.shape)} must be [T, {self.tap_shape}]")
        for apply in self._before:
            taps = apply(taps)
        fused = self._fc.forward(taps.flatten(1))
        return fused if self._after is None else self._after(fused)


def load_tap_fusion(
    path: str | Path,
    target: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> TapFusion:
    """Reads `fc` and its norms from the drafter at `path`, and nothing else.

    Raises CheckpointError as `open_drafter`, and for a missing or misshapen tensor.
    """
    opened = open_drafter(path, target)
    reader = WeightReader(opened.source, dtype=dtype, device=torch.device(device))
    return build_tap_fusion(opened.config, reader)


def build_tap_fusion(config: AnyDrafterConfig, reader: WeightReader) -> TapFusion:
    """The fusion that the config asks for, its tensors from `reader`."""
    num_inputs = len(config.tap_layers) * config.target_hidden_size
    fc = Projection([reader.take("fc.weight", (config.fused_width, num_inputs))])
    eps = config.rms_norm_eps
    if isinstance(config, Eagle3Config):
        return TapFusion(config, fc, before=_norms_before(config, reader))
    norm = load_norm(reader, "hidden_norm", config.hidden_size, eps)
    return TapFusion(config, fc, after=norm.forward)


def _norms_before(config: Eagle3Config, reader: WeightReader) -> list[Callable[[Tensor], Tensor]]:
    num_taps, width = len(config.tap_layers), config.target_hidden_size
    norms: list[Callable[[Tensor], Tensor]] = []
    if config.fc_norm:
        weights = [
            reader.take(f"fc_norm.{i}.weight", (width,), dtype=torch.float32)
            for i in range(num_taps)
        ]
        norms.append(rms_norm(torch.stack(weights), config.rms_norm_eps, reader.dtype).forward)
    if config.norm_before_fc:
        norm = load_norm(reader, "input_norm", num_taps * width, config.rms_norm_eps)
        norms.append(lambda taps: norm.forward(taps.flatten(1)))
    return norms
