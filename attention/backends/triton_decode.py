"""Decode and verify of the triton backend: one launch over the splits, one to merge them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention.backends import triton_fp8_kernel, triton_kernels
from attention.backends.base import DecodeCall, DecodeKernel
from attention.backends.decode_launch import DecodeLaunch, KeyForm, launch_options, unpacks_fp8
from attention.backends.device_plan import (
    BLOCK_KEYS,
    DevicePlan,
    PlanSource,
    ReservedPlan,
    StepPlan,
)
from attention.backends.scratch import Scratch
from attention.backends.triton_tuning import LaunchShape
from attention.interface import AttentionResult, GQACache, MLACache, SplitResult
from attention.rows import DecodeBounds, DecodeRows, rows_of

_LOG2_E = 1.4426950408889634

# SCALES of split_attention.
_NO_SCALES, _ONE_SCALE, _TOKEN_SCALES = range(3)


class _Keys(NamedTuple):
    """Keys and values of one layer: pools [N, P, ...], windows [B*w, ...]; one latent in MLA."""

    key: Tensor
    value: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None
    window_key: Tensor | None
    window_value: Tensor | None


@dataclass(frozen=True, slots=True)
class _Launch:
    """One layer's launch. results: out, lse and the buffers of the partial ones."""

    grid: tuple[int, int]
    shape: LaunchShape
    plan: DevicePlan
    form: KeyForm
    results: tuple[Tensor, Tensor, Tensor, Tensor]


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
        return self._merge(self.gqa_splits(q, cache, window_key, window_value))

    def mla(self, q: Tensor, cache: MLACache, window_latent: Tensor | None) -> AttentionResult:
        """See DecodeKernel."""
        return self._merge(self.mla_splits(q, cache, window_latent))

    def gqa_splits(
        self, q: Tensor, cache: GQACache, window_key: Tensor | None, window_value: Tensor | None
    ) -> SplitResult:
        """See SplitDecodeKernel."""
        self._check_window(window_key, window_value)
        keys = _Keys(*cache, window_key, window_value)
        return self._attend(keys, q, q.shape[-1], is_mla=False)

    def mla_splits(self, q: Tensor, cache: MLACache, window_latent: Tensor | None) -> SplitResult:
        """See SplitDecodeKernel."""
        self._check_window(window_latent)
        latent, scale = cache
        keys = _Keys(latent, latent, scale, scale, window_latent, window_latent)
        return self._attend(keys, q, self._value_width, is_mla=True)

    def _check_window(self, *window: Tensor | None) -> None:
        if self._rows.has_window and any(part is None for part in window):
            raise ValueError("DCP rank 0 needs the in-hand rows of a verify step's window")

    def _attend(self, keys: _Keys, q: Tensor, dim: int, *, is_mla: bool) -> SplitResult:
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
        grid = (self._launch.num_row_blocks(shape), plan.num_workers)
        launch = _Launch(grid, shape, plan, form, (out, lse, *parts))
        if shape.wide:
            self._launch_wide(launch, q.contiguous(), keys)
        elif shape.gluon:
            self._launch_hopper(launch, q.contiguous(), keys)
        elif self._launch.has_pairs(form):
            self._launch_pairs(launch, q.contiguous(), keys)
        else:
            self._launch_portable(launch, q.contiguous(), keys)
        return SplitResult(out, lse, *parts, plan.slot_starts, plan.max_slots)

    def _options(self, launch: _Launch) -> dict[str, Any]:
        """What the split kernels are compiled for."""
        rows, shape = self._rows, launch.shape
        return {
            "NUM_HEADS": self._launch.num_heads,
            "WINDOW": rows.window,
            "HAS_WINDOW": rows.has_window,
            "CAUSAL": rows.window_mask == "causal",
            "PAGE_SIZE": rows.page_size,
            "DIM": launch.form.dim,
            "PE": launch.form.pe,
            "BLOCK_ROWS": shape.block_rows,
            "num_warps": shape.num_warps,
            **launch_options(self._launch.device),
        }

    def _launch_hopper(self, launch: _Launch, q: Tensor, keys: _Keys) -> None:
        from attention.backends import gluon_mla_kernel

        latent, plan = keys.key, launch.plan
        has_tma = self._rows.page_size % BLOCK_KEYS == 0
        descriptors: tuple[object, ...] = (latent, latent)
        if has_tma:
            descriptors = gluon_mla_kernel.descriptors(latent, launch.form.dim, launch.form.pe)
        gluon_mla_kernel.split_mla[launch.grid](
            q,
            latent,
            *descriptors,
            q if keys.window_key is None else keys.window_key.contiguous(),
            *launch.results,
            plan.page_table,
            plan.workers,
            plan.pieces,
            self._scale * _LOG2_E,
            plan.page_table.stride(0),
            TMA=has_tma,
            SWAP=launch.shape.swap,
            PRODUCT_FIRST=launch.shape.product_first,
            **self._options(launch),
        )

    def _launch_wide(self, launch: _Launch, q: Tensor, keys: _Keys) -> None:
        from attention.backends import gluon_mla_wide_kernel

        rows, plan = self._rows, launch.plan
        window = q if keys.window_key is None else keys.window_key.contiguous()
        gluon_mla_wide_kernel.split_mla_wide[launch.grid](
            *gluon_mla_wide_kernel.descriptors(q),
            *gluon_mla_wide_kernel.descriptors(keys.key),
            *gluon_mla_wide_kernel.descriptors(window),
            *launch.results,
            plan.page_table,
            plan.workers,
            plan.pieces,
            self._scale * _LOG2_E,
            plan.page_table.stride(0),
            NUM_HEADS=self._launch.num_heads,
            WINDOW=rows.window,
            HAS_WINDOW=rows.has_window,
            CAUSAL=rows.window_mask == "causal",
            PAGE_SIZE=rows.page_size,
            num_warps=launch.shape.num_warps,
            maxnreg=gluon_mla_wide_kernel.MAX_REGISTERS,
            **launch_options(self._launch.device),
        )

    def _launch_pairs(self, launch: _Launch, q: Tensor, keys: _Keys) -> None:
        key, value = keys.key.view(torch.int16), keys.value.view(torch.int16)
        triton_fp8_kernel.split_fp8[launch.grid](
            *self._pool_arguments(launch, q, keys._replace(key=key, value=value)),
            HALF_PAD=_padded(launch.form.dim // 2),
            HALF_PE_PAD=_padded(launch.form.pe // 2),
            PTX=unpacks_fp8(self._launch.device),
            **self._pool_options(launch, keys),
            **self._options(launch),
        )

    def _launch_portable(self, launch: _Launch, q: Tensor, keys: _Keys) -> None:
        triton_kernels.split_attention[launch.grid](
            *self._pool_arguments(launch, q, keys),
            DIM_PAD=_padded(launch.form.dim),
            PE_PAD=_padded(launch.form.pe),
            SWAP=launch.shape.swap,
            **self._pool_options(launch, keys),
            **self._options(launch),
        )

    def _pool_arguments(self, launch: _Launch, q: Tensor, keys: _Keys) -> tuple[object, ...]:
        """Arguments of split_attention and split_fp8."""
        plan = launch.plan
        key_scale, value_scale = (
            q if scale is None else scale for scale in (keys.key_scale, keys.value_scale)
        )
        return (
            q,
            keys.key,
            keys.value,
            key_scale,
            value_scale,
            q if keys.window_key is None else keys.window_key.contiguous(),
            q if keys.window_value is None else keys.window_value.contiguous(),
            *launch.results,
            plan.page_table,
            plan.workers,
            plan.pieces,
            plan.head_starts,
            self._scale * _LOG2_E,
            plan.page_table.stride(0),
            keys.key.stride(1),
            keys.value.stride(1),
            _row_stride(key_scale),
            _row_stride(value_scale),
        )

    def _pool_options(self, launch: _Launch, keys: _Keys) -> dict[str, Any]:
        """What both kernels are compiled for, beside _options."""
        return {
            "NUM_KV_HEADS": self._launch.num_kv_heads,
            "GROUP": self._launch.group_size,
            "IS_MLA": launch.form.is_mla,
            "SCALES": _scale_kind(keys),
            "BLOCK_KEYS": launch.shape.block_keys,
            "BLOCK_WINDOW": 16,
            "STAGES": launch.shape.num_stages,
        }

    def _merge(self, splits: SplitResult) -> AttentionResult:
        out, lse, part_out, part_lse, slot_starts, max_slots = splits
        if max_slots:
            num_tokens, num_heads, dim = out.shape
            block_slots, block_dim = merge_blocks(
                max_slots, len(part_out), len(slot_starts) - 1, dim
            )
            triton_kernels.merge_splits[(num_tokens * num_heads, -(-dim // block_dim))](
                out,
                lse,
                part_out,
                part_lse,
                slot_starts,
                ROWS=self._rows.window * num_heads,
                DIM=dim,
                BLOCK_SLOTS=block_slots,
                BLOCK_DIM=block_dim,
                num_warps=4,
                **launch_options(self._launch.device),
            )
        return AttentionResult(out, lse)


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


def merge_blocks(max_slots: int, num_slots: int, num_sequences: int, dim: int) -> tuple[int, int]:
    """Slots and columns of a tile of the merge.

    A single sequence has all slots and too few rows to fill the GPU: all slots at once and narrow
    columns. Of many sequences one may have them all, but most have few: they decide.
    """
    usual = min(max_slots, max(2, 4 * num_slots // num_sequences))
    block_slots = min(256, _padded(usual, least=2))
    return block_slots, min(_padded(dim), max(32, 8192 // block_slots))


def _scale_kind(keys: _Keys) -> int:
    """SCALES of the kernels. Raises ValueError where keys and values have scales of two kinds."""
    kinds = [
        _NO_SCALES if s is None else _ONE_SCALE if s.numel() == 1 else _TOKEN_SCALES
        for s in (keys.key_scale, keys.value_scale)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError("keys and values must both have one scale, one a token, or none")
    return kinds[0]


def _row_stride(scale: Tensor) -> int:
    """Elements between the scales of two rows, which must lie at one distance all over the pool."""
    return scale.stride(0) if scale.dim() == 1 else rows_of(scale).stride(0)


def _padded(width: int, least: int = 16) -> int:
    """The next power of two that a tile can have."""
    return max(least, 1 << (width - 1).bit_length()) if width else least
