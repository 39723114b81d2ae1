"""Decode and verify of the triton backend: one launch over the splits, one to merge them."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.backends.base import DecodeCall, DecodeKernel
from attention.backends.decode_launch import DecodeLaunch, KeyForm
from attention.backends.device_plan import PlanSource, ReservedPlan, StepPlan
from attention.backends.scratch import Scratch
from attention.backends.split_launch import LayerKeys, SplitLaunch
from attention.backends.triton_merge import merge
from attention.interface import AttentionResult, GQACache, MLACache, SplitResult
from attention.rows import DecodeBounds, DecodeRows

_LOG2_E = 1.4426950408889634


class TritonDecodeKernel:
    """Decode attention with the plans of `plans`: of one step, or whatever step is in buffers."""

    def __init__(
        self, launch: DecodeLaunch, plans: PlanSource, *, scale: float, value_width: int
    ) -> None:
        """value_width: see AttentionBackend.plan_decode."""
        self._launch = launch
        self._rows = launch.rows
        self._plans = plans
        self._scale = scale
        self._value_width = value_width

    def gqa(
        self, q: Tensor, cache: GQACache, window_key: Tensor | None, window_value: Tensor | None
    ) -> AttentionResult:
        """See DecodeKernel."""
        return merge(self.gqa_splits(q, cache, window_key, window_value))

    def mla(self, q: Tensor, cache: MLACache, window_latent: Tensor | None) -> AttentionResult:
        """See DecodeKernel."""
        return merge(self.mla_splits(q, cache, window_latent))

    def gqa_splits(
        self, q: Tensor, cache: GQACache, window_key: Tensor | None, window_value: Tensor | None
    ) -> SplitResult:
        """See SplitDecodeKernel."""
        self._check_window(window_key, window_value)
        keys = LayerKeys(
            cache.key, cache.value, cache.key_scale, cache.value_scale, window_key, window_value
        )
        return self._attend(keys, q, q.shape[-1], is_mla=False)

    def mla_splits(self, q: Tensor, cache: MLACache, window_latent: Tensor | None) -> SplitResult:
        """See SplitDecodeKernel."""
        self._check_window(window_latent)
        latent, scale = cache.latent, cache.scale
        keys = LayerKeys(latent, latent, scale, scale, window_latent, window_latent)
        return self._attend(keys, q, self._value_width, is_mla=True)

    def _check_window(self, *window: Tensor | None) -> None:
        if self._rows.has_window and any(part is None for part in window):
            raise ValueError("DCP rank 0 needs the in-hand rows of a verify step's window")

    def _attend(self, keys: LayerKeys, q: Tensor, dim: int, *, is_mla: bool) -> SplitResult:
        num_tokens, num_heads, width = q.shape
        out = q.new_empty(num_tokens, num_heads, dim)
        lse = q.new_empty(num_tokens, num_heads, dtype=torch.float32)
        if not num_tokens or not num_heads:
            nothing = lse.new_empty(0)
            return SplitResult(out, lse, nothing, nothing, nothing.to(torch.int32), 0)
        form = KeyForm(
            is_mla=is_mla,
            dim=dim,
            pe=width - dim,
            dtype=q.dtype,
            kv_dtype=keys.key.dtype,
            row_stride=keys.key.stride(1),
        )
        shape = self._launch.shape(form)
        plan = self._plans.device_plan(self._launch.limits(shape))
        partial_dtype = q.dtype if shape.rounds_partials else torch.float32
        parts = self._plans.partials(self._rows.window * num_heads, dim, partial_dtype)
        results = (out, lse, *parts)
        qk_scale = self._scale * _LOG2_E
        SplitLaunch(self._launch, form, plan, q.contiguous(), keys, qk_scale, results).run()
        return SplitResult(out, lse, *parts, plan.slot_starts, plan.max_slots)


class ReservedTritonDecode:
    """See ReservedDecode."""

    def __init__(
        self,
        bounds: DecodeBounds,
        call: DecodeCall,
        *,
        split_keys: int | None,
        scratch: Scratch,
        device: torch.device,
    ) -> None:
        """split_keys: as in StepPlan."""
        launch = DecodeLaunch(bounds, call.kv_index, device)
        form = KeyForm(
            is_mla=call.is_mla,
            dim=call.value_width,
            pe=call.key_width - call.value_width,
            dtype=call.dtype,
            kv_dtype=call.kv_dtype,
            row_stride=call.key_width * (1 if call.is_mla else launch.num_kv_heads),
        )
        shape = launch.shape(form)
        self._plans = ReservedPlan(
            bounds,
            launch.limits(shape),
            head_starts=launch.head_starts,
            split_keys=split_keys,
            device=device,
        )
        rows = bounds.window * launch.num_heads
        partial_dtype = call.dtype if shape.rounds_partials else torch.float32
        self._plans.reserve_partials(scratch, rows, call.value_width, partial_dtype, device)
        self._kernel = TritonDecodeKernel(
            launch, self._plans, scale=call.scale, value_width=call.value_width
        )

    def fill(self, rows: DecodeRows) -> DecodeKernel:
        """See ReservedDecode."""
        self._plans.fill(rows)
        return self._kernel

    def grow(self) -> None:
        """See ReservedDecode."""
        self._plans.grow()


def plan_step(
    rows: DecodeRows,
    *,
    kv_index: tuple[int, ...],
    scale: float,
    value_width: int,
    split_keys: int | None,
    scratch: Scratch,
    device: torch.device,
) -> TritonDecodeKernel:
    """The kernel of one step. Arguments as in AttentionBackend.plan_decode and StepPlan."""
    launch = DecodeLaunch(rows, kv_index, device)
    plans = StepPlan(
        rows,
        head_starts=launch.head_starts,
        split_keys=split_keys,
        scratch=scratch,
        device=device,
    )
    return TritonDecodeKernel(launch, plans, scale=scale, value_width=value_width)
