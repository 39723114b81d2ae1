"""Attention with Triton kernels of ours, on NVIDIA and AMD GPUs."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from attention import accelerator
from attention.backends.base import DecodeCall, DecodeKernel, ExtendKernel, ReservedDecode
from attention.backends.scratch import Scratch
from attention.backends.triton_fit import shared_memory_refusals
from attention.interface import MLAGeometry
from attention.rows import DecodeBounds, DecodeRows, ExtendRows

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
    """The `triton` backend: kernels of ours for decode, verify and extend.

    Their LSE is natural-log. Triton itself is imported when the first step is planned.
    """

    name = "triton"

    def __init__(self, *, deterministic: bool = False) -> None:
        """deterministic: split sequences at fixed places, so that the result of one does not
        depend on the others in its batch; in extend of MLA as far as the batched products by which
        torch expands the latent do not. Slower for small batches of long sequences."""
        self._deterministic = deterministic
        self._split_keys = _FIXED_SPLIT_KEYS if deterministic else None
        self._scratch = Scratch()

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
        if needs.kv_dtype not in (needs.dtype, torch.float8_e4m3fn):
            reasons.append(
                f"KV dtype {needs.kv_dtype} is neither the model dtype {needs.dtype} nor "
                f"{torch.float8_e4m3fn}"
            )
        # Extend is given rows that are out of their pages and scales already.
        if needs.operations - {"extend"}:
            reasons += _pool_refusals(needs)
        return [*reasons, *_width_refusals(needs), *shared_memory_refusals(needs)]

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
        from attention.backends.triton_decode import plan_step

        return plan_step(
            rows,
            kv_index=kv_index,
            scale=scale,
            value_width=value_width,
            split_keys=self._split_keys,
            scratch=self._scratch,
            device=device,
        )

    def reserve_decode(
        self, bounds: DecodeBounds, call: DecodeCall, device: torch.device
    ) -> ReservedDecode:
        """See CapturableBackend. Reserve the largest bounds first: partial results then share one
        buffer."""
        from attention.backends.triton_decode import ReservedTritonDecode

        return ReservedTritonDecode(
            bounds,
            call,
            split_keys=self._split_keys,
            scratch=self._scratch,
            device=device,
        )

    def plan_extend(
        self, rows: ExtendRows, *, kv_index: tuple[int, ...], scale: float, device: torch.device
    ) -> ExtendKernel:
        """See AttentionBackend."""
        from attention.backends.triton_extend import TritonExtendKernel

        return TritonExtendKernel(
            rows,
            kv_index=kv_index,
            scale=scale,
            deterministic=self._deterministic,
            device=device,
        )


def _pool_refusals(needs: AttentionNeeds) -> list[str]:
    """Pools that the decode kernels cannot read."""
    reasons = []
    is_e4m3, found = needs.kv_dtype == torch.float8_e4m3fn, accelerator.current_accelerator()
    if is_e4m3 and found is not None and not accelerator.converts_e4m3(found):
        reasons.append(
            f"GPU {found.architecture} has no instructions for {needs.kv_dtype}; sm89 and newer "
            "have"
        )
    if needs.page_size > MAX_PAGE_SIZE:
        reasons.append(f"page_size {needs.page_size} is above {MAX_PAGE_SIZE}")
    return reasons


def _width_refusals(needs: AttentionNeeds) -> list[str]:
    geometry = needs.geometry
    if isinstance(geometry, MLAGeometry):
        limits = [
            ("kv_lora_rank", geometry.kv_lora_rank, MAX_LATENT_RANK),
            ("qk_rope_head_dim", geometry.qk_rope_head_dim, MAX_ROPE_DIM),
            ("qk_nope_head_dim", geometry.qk_nope_head_dim, MAX_HEAD_DIM),
            ("v_head_dim", geometry.v_head_dim, MAX_HEAD_DIM),
        ]
    else:
        limits = [("head_dim", geometry.head_dim, MAX_HEAD_DIM)]
    return [f"{name} {width} is above {limit}" for name, width, limit in limits if width > limit]
