"""Attention with Triton kernels of ours, on NVIDIA and AMD GPUs."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from attention.backends.base import DecodeKernel
from attention.backends.scratch import Scratch
from attention.backends.torch_backend import TorchBackend
from attention.backends.torch_extend import TorchExtendKernel
from attention.interface import MLAGeometry
from attention.rows import DecodeRows, ExtendRows

if TYPE_CHECKING:
    from attention.dispatch import AttentionNeeds

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
MAX_LATENT_RANK = 512
MAX_ROPE_DIM = 64
MAX_PAGE_SIZE = 128

# Keys of a piece in deterministic mode.
_FIXED_SPLIT_KEYS = 1024


class TritonBackend:
    """The `triton` backend: decode and verify by our kernels, extend by stock torch operators.

    The kernels' LSE is natural-log. Triton itself is imported when the first step is planned.
    """

    name = "triton"

    def __init__(self, *, deterministic: bool = False) -> None:
        """deterministic: split sequences at fixed places, so that the result of one does not
        depend on the others in its batch. Slower for small batches of long sequences."""
        self._split_keys = _FIXED_SPLIT_KEYS if deterministic else None
        self._scratch = Scratch()
        self._extend = TorchBackend()

    def refusals(self, needs: AttentionNeeds) -> list[str]:
        """Devices other than GPUs, absent triton, dtypes and sizes that no kernel has."""
        reasons = []
        if needs.device != "cuda":
            reasons.append(f"device {needs.device!r} is not cuda")
        if importlib.util.find_spec("triton") is None:
            reasons.append("triton is not installed")
        if needs.dtype not in DTYPES:
            names = ", ".join(str(dtype) for dtype in DTYPES)
            reasons.append(f"dtype {needs.dtype} is not one of {names}")
        if needs.kv_dtype != needs.dtype:
            reasons.append(f"KV dtype {needs.kv_dtype} differs from the model dtype {needs.dtype}")
        if needs.page_size > MAX_PAGE_SIZE:
            reasons.append(f"page_size {needs.page_size} is above {MAX_PAGE_SIZE}")
        return reasons + _width_refusals(needs)

    def plan_decode(
        self,
        rows: DecodeRows,
        *,
        kv_index: tuple[int, ...],
        scale: float,
        value_width: int,
        device: torch.device,
    ) -> DecodeKernel:
        """See AttentionBackend."""
        from attention.backends.triton_decode import TritonDecodeKernel

        return TritonDecodeKernel(
            rows,
            kv_index=kv_index,
            scale=scale,
            value_width=value_width,
            split_keys=self._split_keys,
            scratch=self._scratch,
            device=device,
        )

    def plan_extend(
        self, rows: ExtendRows, *, kv_index: tuple[int, ...], scale: float, device: torch.device
    ) -> TorchExtendKernel:
        """See AttentionBackend."""
        return self._extend.plan_extend(rows, kv_index=kv_index, scale=scale, device=device)


def _width_refusals(needs: AttentionNeeds) -> list[str]:
    geometry = needs.geometry
    if isinstance(geometry, MLAGeometry):
        limits = [
            ("kv_lora_rank", geometry.kv_lora_rank, MAX_LATENT_RANK),
            ("qk_rope_head_dim", geometry.qk_rope_head_dim, MAX_ROPE_DIM),
        ]
    else:
        limits = [("head_dim", geometry.head_dim, MAX_HEAD_DIM)]
    return [f"{name} {width} is above {limit}" for name, width, limit in limits if width > limit]
