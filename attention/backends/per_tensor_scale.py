"""fp8 for kernels whose KV scale is one number: the scale as a float, the query as fp8."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

FP8 = torch.float8_e4m3fn
_MAX_FP8 = 448.0


class PerTensorScales:
    """Scales of the layers' pools as floats, each read from its device once.

    A pool's per-tensor scale does not change while the pool lives, and reading it in each layer
    of each step would wait for the device each time.
    """

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()

    def value(self, scale: Tensor | None) -> float:
        """1.0 for None. Raises ValueError for more than one number (per-token scales)."""
        if scale is None:
            return 1.0
        if scale not in self._known:
            if scale.numel() != 1:
                raise ValueError(
                    f"the KV scale has shape {tuple(scale.shape)}; this backend takes one number"
                )
            self._known[scale] = float(scale)
        return float(self._known[scale])


def query_as(q: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """q in the dtype of the pool: kernels that read fp8 keys multiply them by fp8 queries.

    Query scale 1; what fp8 cannot hold saturates at 448 (a plain cast would give NaN).
    """
    if kv_dtype != FP8:
        return q
    return q.clamp(-_MAX_FP8, _MAX_FP8).to(FP8)
