"""Decode and verify of the triton backend: one launch over the splits, one to merge them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention.backends import triton_kernels
from attention.backends.scratch import Scratch
from attention.backends.split_plan import SplitPlan, balanced_plan, fixed_plan
from attention.backends.triton_tuning import LaunchShape, launch_shape
from attention.interface import AttentionResult, GQACache, MLACache
from attention.rows import DecodeRows

# Pieces start at multiples of this many keys, so that a tile never straddles two pages of that
# size and every tile size up to it can use one plan.
BLOCK_KEYS = 64

_LOG2_E = 1.4426950408889634
# What the interpreter, which has no SMs, splits for.
_INTERPRETED_SMS = 4


@dataclass(frozen=True, slots=True)
class _DevicePlan:
    """A SplitPlan on the device, int32."""

    plan: SplitPlan
    pieces: Tensor
    workers: Tensor
    slot_starts: Tensor


@dataclass(frozen=True, slots=True)
class _Widths:
    """Columns of a key: `dim` that are also the value's width, then `pe` (0 for GQA)."""

    dim: int
    pe: int


class _Keys(NamedTuple):
    """Keys and values of one layer: pools [N, P, ...], windows [B*w, ...]; one latent in MLA."""

    key: Tensor
    value: Tensor
    window_key: Tensor | None
    window_value: Tensor | None


@dataclass(frozen=True, slots=True)
class _Launch:
    """One layer's launch. results: out, lse and the buffers of the partial ones."""

    grid: tuple[int, int]
    shape: LaunchShape
    split: _DevicePlan
    widths: _Widths
    results: tuple[Tensor, Tensor, Tensor, Tensor]


class TritonDecodeKernel:
    """One step's decode attention. Valid until the backend plans the next step.

    The first layer's call cuts the batch into pieces and uploads them; later layers only launch.
    """

    def __init__(
        self,
        rows: DecodeRows,
        *,
        kv_index: tuple[int, ...],
        scale: float,
        value_width: int,
        split_keys: int | None,
        scratch: Scratch,
        device: torch.device,
    ) -> None:
        """split_keys: keys of a piece where results must not depend on the batch, else None.

        Raises ValueError for a kv_index that decreases.
        """
        self._rows = rows
        self._num_heads = len(kv_index)
        self._head_starts_host = head_starts(kv_index)
        self._group = max((b - a for a, b in pairwise(self._head_starts_host)), default=0)
        self._scale = scale
        self._value_width = value_width
        self._split_keys = split_keys
        self._scratch = scratch
        self._device = device
        self._page_table = rows.page_table.to(torch.int32).contiguous().to(device)
        self._head_starts = _on_device(self._head_starts_host, device)
        self._plans: dict[tuple[int, int], _DevicePlan] = {}

    def gqa(
        self, q: Tensor, cache: GQACache, window_key: Tensor | None, window_value: Tensor | None
    ) -> AttentionResult:
        """See DecodeKernel."""
        self._check_window(window_key, window_value)
        keys = _Keys(cache.key, cache.value, window_key, window_value)
        return self._attend(keys, q, _Widths(q.shape[-1], 0), is_mla=False)

    def mla(self, q: Tensor, cache: MLACache, window_latent: Tensor | None) -> AttentionResult:
        """See DecodeKernel."""
        self._check_window(window_latent)
        keys = _Keys(cache.latent, cache.latent, window_latent, window_latent)
        widths = _Widths(self._value_width, q.shape[-1] - self._value_width)
        return self._attend(keys, q, widths, is_mla=True)

    def _check_window(self, *window: Tensor | None) -> None:
        if self._rows.has_window and any(part is None for part in window):
            raise ValueError("DCP rank 0 needs the in-hand rows of a verify step's window")

    def _attend(self, keys: _Keys, q: Tensor, widths: _Widths, *, is_mla: bool) -> AttentionResult:
        out = q.new_empty(q.shape[0], self._num_heads, widths.dim)
        lse = q.new_empty(q.shape[0], self._num_heads, dtype=torch.float32)
        if not q.shape[0] or not self._num_heads:
            return AttentionResult(out, lse)
        num_kv_heads = len(self._head_starts_host) - 1
        num_rows = self._rows.window * self._group
        shape = launch_shape(
            is_mla=is_mla,
            rows=num_rows,
            keys=sum(self._rows.committed_lens),
            dim=widths.dim,
            itemsize=keys.key.element_size(),
            has_gluon=is_mla and self._has_gluon(keys.key, widths),
        )
        row_blocks = num_kv_heads * -(-num_rows // shape.block_rows)
        split = self._split(shape, row_blocks)
        launch = _Launch(
            grid=(row_blocks, split.plan.num_workers),
            shape=shape,
            split=split,
            widths=widths,
            results=(out, lse, *self._partials(split.plan.num_slots, widths.dim)),
        )
        if shape.gluon:
            self._launch_hopper(launch, q.contiguous(), keys)
        else:
            self._launch_portable(launch, q.contiguous(), keys, is_mla=is_mla)
        if split.plan.max_slots:
            self._merge(launch)
        return AttentionResult(out, lse)

    def _options(self, launch: _Launch) -> dict[str, Any]:
        """What both split kernels are compiled for."""
        rows, shape = self._rows, launch.shape
        has_pdl = _has_dependent_launch(self._device)
        return {
            "NUM_HEADS": self._num_heads,
            "WINDOW": rows.window,
            "HAS_WINDOW": rows.has_window,
            "CAUSAL": rows.window_mask == "causal",
            "PAGE_SIZE": rows.page_size,
            "DIM": launch.widths.dim,
            "PE": launch.widths.pe,
            "SWAP": shape.swap,
            "BLOCK_ROWS": shape.block_rows,
            "PDL": has_pdl,
            "num_warps": shape.num_warps,
            **_launch_options(has_pdl),
        }

    def _launch_hopper(self, launch: _Launch, q: Tensor, keys: _Keys) -> None:
        from attention.backends import gluon_mla_kernel

        latent, widths = keys.key, launch.widths
        has_tma = self._rows.page_size % BLOCK_KEYS == 0
        descriptors: tuple[object, ...] = (latent, latent)
        if has_tma:
            descriptors = gluon_mla_kernel.descriptors(latent, widths.dim, widths.pe)
        gluon_mla_kernel.split_mla[launch.grid](
            q,
            latent,
            *descriptors,
            q if keys.window_key is None else keys.window_key.contiguous(),
            *launch.results,
            self._page_table,
            launch.split.workers,
            launch.split.pieces,
            self._scale * _LOG2_E,
            self._page_table.stride(0),
            TMA=has_tma,
            PRODUCT_FIRST=launch.shape.product_first,
            **self._options(launch),
        )

    def _launch_portable(self, launch: _Launch, q: Tensor, keys: _Keys, *, is_mla: bool) -> None:
        triton_kernels.split_attention[launch.grid](
            q,
            keys.key,
            keys.value,
            q if keys.window_key is None else keys.window_key.contiguous(),
            q if keys.window_value is None else keys.window_value.contiguous(),
            *launch.results,
            self._page_table,
            launch.split.workers,
            launch.split.pieces,
            self._head_starts,
            self._scale * _LOG2_E,
            self._page_table.stride(0),
            keys.key.stride(1),
            keys.value.stride(1),
            NUM_KV_HEADS=len(self._head_starts_host) - 1,
            GROUP=self._group,
            DIM_PAD=_padded(launch.widths.dim),
            PE_PAD=_padded(launch.widths.pe),
            IS_MLA=is_mla,
            BLOCK_KEYS=launch.shape.block_keys,
            BLOCK_WINDOW=16,
            STAGES=launch.shape.num_stages,
            **self._options(launch),
        )

    def _merge(self, launch: _Launch) -> None:
        out = launch.results[0]
        num_tokens, num_heads, dim = out.shape
        block_slots = min(256, _padded(launch.split.plan.max_slots, least=2))
        block_dim = min(_padded(dim), max(32, 8192 // block_slots))
        has_pdl = _has_dependent_launch(self._device)
        triton_kernels.merge_splits[(num_tokens * num_heads, -(-dim // block_dim))](
            *launch.results,
            launch.split.slot_starts,
            ROWS=self._rows.window * num_heads,
            DIM=dim,
            BLOCK_SLOTS=block_slots,
            BLOCK_DIM=block_dim,
            PDL=has_pdl,
            num_warps=4,
            **_launch_options(has_pdl),
        )

    def _has_gluon(self, latent: Tensor, widths: _Widths) -> bool:
        """Whether the Hopper kernel serves this pool: 16-bit rows without gaps, powers of two."""
        return (
            triton_kernels.HAS_GLUON
            and _is_hopper(self._device)
            and latent.element_size() == 2
            and latent.stride(1) == widths.dim + widths.pe
            and widths.dim in (64, 128, 256, 512)
            and widths.pe in (16, 32, 64)
            and self._rows.window <= BLOCK_KEYS
        )

    def _split(self, shape: LaunchShape, row_blocks: int) -> _DevicePlan:
        """The plan for this launch, made once a step."""
        workers = max(1, num_sms(self._device) * shape.programs_per_sm // row_blocks)
        key = (workers, shape.min_blocks)
        if key not in self._plans:
            adds_window = [self._rows.has_window and not pad for pad in self._rows.is_padding]
            lengths = self._rows.committed_lens
            if self._split_keys is None:
                plan = balanced_plan(
                    lengths,
                    adds_window,
                    block_keys=BLOCK_KEYS,
                    max_workers=workers,
                    min_blocks=shape.min_blocks,
                )
            else:
                plan = fixed_plan(lengths, adds_window, split_keys=self._split_keys)
            pages = self._rows.page_table.numpy()
            records = plan.worker_records(lambda b, i: int(pages[b, i]), self._rows.page_size)
            self._plans[key] = _DevicePlan(
                plan,
                _on_device([field for piece in plan.pieces for field in piece], self._device),
                _on_device(records, self._device),
                _on_device(plan.slot_starts, self._device),
            )
        return self._plans[key]

    def _partials(self, num_slots: int, dim: int) -> tuple[Tensor, Tensor]:
        rows = self._rows.window * self._num_heads
        return (
            self._scratch.take("part_out", (num_slots, rows, dim), torch.float32, self._device),
            self._scratch.take("part_lse", (num_slots, rows), torch.float32, self._device),
        )


def head_starts(kv_index: tuple[int, ...]) -> list[int]:
    """First query head of each KV head in the cache, and the number of query heads at the end.

    Raises ValueError where kv_index, the KV head of each query head, decreases.
    """
    if list(kv_index) != sorted(kv_index):
        raise ValueError(f"kv_index {kv_index} must not decrease")
    num_kv_heads = kv_index[-1] + 1 if kv_index else 0
    starts = [0] * (num_kv_heads + 1)
    for kv_head in kv_index:
        starts[kv_head + 1] += 1
    for i in range(num_kv_heads):
        starts[i + 1] += starts[i]
    return starts


@lru_cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors (compute units on AMD) of the device."""
    if device.type == "cpu":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache
def _has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one that it depends on has ended (Hopper on)."""
    if device.type == "cpu" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    if device.type == "cpu" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def _launch_options(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}


def _on_device(values: list[int] | tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)


def _padded(width: int, least: int = 16) -> int:
    """The next power of two that a tile can have."""
    return max(least, 1 << (width - 1).bit_length()) if width else least
