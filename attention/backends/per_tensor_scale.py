"""fp8 for kernels whose KV scale is one number: the scale as a float, the query as fp8."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.interface import GQACache, MLACache

FP8 = torch.float8_e4m3fn
_MAX_FP8 = 448.0


def latent_scale(cache: MLACache) -> float:
    """Scale of the latents, 1.0 where they have none. Never reads the device.

    Raises ValueError for scales that the cache does not also give as one number.
    """
    if cache.host_scale is None:
        _refuse("host_scale", cache.scale)
        return 1.0
    return cache.host_scale


def head_scales(cache: GQACache) -> tuple[float, float]:
    """Scales of keys and values, otherwise as `latent_scale`."""
    if cache.host_scales is None:
        _refuse("host_scales", cache.key_scale)
        return 1.0, 1.0
    return cache.host_scales


def query_as(q: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """q in the dtype of the pool: kernels that read fp8 keys multiply them by fp8 queries.

    Query scale 1; what fp8 cannot hold saturates at 448 (a plain cast would give NaN).
    """
    if kv_dtype != FP8:
        return q
    return q.clamp(-_MAX_FP8, _MAX_FP8).to(FP8)


def _refuse(field: str, scale: Tensor | None) -> None:
    if scale is not None:
        raise ValueError(
            f"the KV scale has shape {tuple(scale.shape)} and no {field}; this backend takes one "
            f"number from the host"
        )
