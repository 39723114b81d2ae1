"""RMSNorm, in the form that runs fastest here."""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm(Protocol):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> same."""
        ...


class ComposedRMSNorm:
    """Implements RMSNorm with four small operations: on a CPU torch's own takes three times as
    long."""

    __slots__ = ("_floor", "_scaled_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        """weight: fp32 [..., size]."""
        size = weight.shape[-1]
        self._scaled_weight = weight * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """See RMSNorm. sqrt(sum(x^2) + size * eps) as a hypotenuse."""
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide * self._scaled_weight).div_(length.hypot_(self._floor)).to(x.dtype)


class FusedRMSNorm:
    """Implements RMSNorm with torch's kernel for GPUs: one launch, or two where each head has a
    weight of its own.

    The weight is in the dtype of x, without which torch would take eight launches.
    """

    __slots__ = ("_eps", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        """weight: [size], or [heads, size], in the dtype of x."""
        self._weight = weight
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """See RMSNorm."""
        weight = self._weight
        if weight.dim() == 1:
            return F.rms_norm(x, weight.shape, weight, self._eps)
        return F.rms_norm(x, weight.shape[-1:], None, self._eps).mul_(weight)


def rms_norm(weight: Tensor, eps: float, dtype: torch.dtype) -> RMSNorm:
    """weight: fp32, [size] or, where each head has one of its own, [heads, size]. dtype: of x."""
    if weight.device.type == "cpu":
        return ComposedRMSNorm(weight, eps)
    return FusedRMSNorm(weight.to(dtype), eps)
