"""Rotary embedding: frequencies of every supported type, and the rotation. T tokens, D width."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvbraid.errors import CheckpointError
from kvbraid.model.config import RopeConfig


class RopeTables(NamedTuple):
    """One step's rotation. cos: [T, 1, D]; signed_sin: [T, 1, D], its first half negated."""

    cos: Tensor
    signed_sin: Tensor


class Rotary:
    """Rotates heads in the half-split layout: number j is paired with number j + D/2."""

    def __init__(self, rope: RopeConfig, dim: int, device: torch.device) -> None:
        pairs = inverse_frequencies(rope, dim).to(device)
        # Of the cosines, then of the signed sines: a step's tables take five launches.
        self._frequencies = torch.cat((pairs, pairs, -pairs, pairs))
        self._factor = rope.cos_sin_factor

    def tables(self, positions: Tensor, dtype: torch.dtype) -> RopeTables:
        """positions: int64 [T]. Angles are fp32 whatever the dtype of the tables."""
        angles = (positions[:, None] * self._frequencies)[:, None]
        of_cos, of_sin = angles.chunk(2, -1)
        cos, signed_sin = of_cos.cos(), of_sin.sin()
        if self._factor != 1.0:
            cos.mul_(self._factor)
            signed_sin.mul_(self._factor)
        return RopeTables(cos.to(dtype), signed_sin.to(dtype))


def rotate(heads: Tensor, tables: RopeTables) -> Tensor:
    """heads [T, any, D] -> rotated copy."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * tables.cos, swapped, tables.signed_sin)


def inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Radians a position of each of the dim/2 pairs, float32 [dim/2]."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.rope_type == "default":
        return plain
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, plain)
    if rope.rope_type == "yarn":
        return _yarn(rope, plain, dim)
    factors = torch.tensor(rope.frequency_factors)
    if rope.rope_type != "factors" or factors.shape != plain.shape:
        raise CheckpointError(
            f"rope type {rope.rope_type!r} with {len(factors)} frequency factors for {dim // 2} "
            "pairs; accepted: default, linear, llama3, yarn, or one factor a pair"
        )
    return plain / factors


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, the ones between blended."""
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(wavelengths > original / low, plain / rope.factor, blended)
    return torch.where(wavelengths < original / high, plain, scaled)


def _yarn(rope: RopeConfig, plain: Tensor, dim: int) -> Tensor:
    """Pairs that turn often are kept, pairs that turn rarely interpolated, a ramp between."""

    def pair_of(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)
