"""Attention with stock torch operators: any device, fast on CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attention.backends.scratch import Scratch
from attention.backends.torch_decode import TorchDecodeKernel
from attention.backends.torch_extend import TorchExtendKernel
from attention.heads import fold_heads
from attention.rows import DecodeRows, ExtendRows

if TYPE_CHECKING:
    from attention.dispatch import AttentionNeeds

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TorchBackend:
    """The `torch` backend. LSE is natural-log at the source, nothing is converted."""

    name = "torch"

    def __init__(self) -> None:
        self._scratch = Scratch()

    def refusals(self, needs: AttentionNeeds) -> list[str]:
        """Only dtypes are refused; heads, widths, pages and operations are all served."""
        reasons = []
        if needs.dtype not in DTYPES:
            names = ", ".join(str(dtype) for dtype in DTYPES)
            reasons.append(f"dtype {needs.dtype} is not one of {names}")
        if needs.kv_dtype not in (needs.dtype, torch.float8_e4m3fn):
            reasons.append(
                f"KV dtype {needs.kv_dtype} is neither the model dtype {needs.dtype} nor "
                f"{torch.float8_e4m3fn}"
            )
        return reasons

    def plan_decode(
        self,
        rows: DecodeRows,
        *,
        kv_index: tuple[int, ...],
        scale: float,
        value_width: int,
        device: torch.device,
    ) -> TorchDecodeKernel:
        """See AttentionBackend."""
        return TorchDecodeKernel(
            rows,
            heads=fold_heads(kv_index, device),
            scale=scale,
            value_width=value_width,
            scratch=self._scratch,
            device=device,
        )

    def plan_extend(
        self, rows: ExtendRows, *, kv_index: tuple[int, ...], scale: float, device: torch.device
    ) -> TorchExtendKernel:
        """See AttentionBackend."""
        return TorchExtendKernel(
            rows, heads=fold_heads(kv_index, device), scale=scale, device=device
        )
