"""Rows in float8_e4m3fn for tests, and the true values that an oracle is given."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

KINDS = ("per tensor", "per token")
# No power of two, so that it cannot be lost in an exponent.
ONE_SCALE = 0.0137


class QuantisedRows(NamedTuple):
    """stored: float32 numbers that float8_e4m3fn has, [L, heads, width]; scale: float32 [L, heads],
    all ONE_SCALE if there is one per tensor; values: stored * scale in float64."""

    stored: Tensor
    scale: Tensor
    values: Tensor


def quantise(rows: Tensor, kind: str, *, factor: float = 1.0) -> QuantisedRows:
    """factor: by which rows with a scale of their own are made larger first."""
    scale = torch.full(rows.shape[:-1], ONE_SCALE, device=rows.device)
    if kind == "per token":
        rows = rows * factor
        scale = rows.float().abs().amax(-1) / 448
    stored = (rows.float() / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return QuantisedRows(stored, scale, stored.double() * scale[..., None].double())


def pool_scale(scales: Tensor, kind: str) -> Tensor:
    """The scale that a cache is given, [N, heads, P] or [1]. scales: one a token, [N, P, heads]."""
    if kind == "per token":
        return scales.transpose(1, 2).contiguous()
    return scales.new_full((1,), ONE_SCALE)
