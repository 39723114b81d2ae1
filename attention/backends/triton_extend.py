"""Extend of the triton backend: causal attention over [prefix | chunk], prefixes read in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attention.backends import triton_extend_kernels
from attention.backends.extend_keys import (
    ExtendKeys,
    can_copy,
    expand_latent,
    padded_width,
    unit_stride,
)
from attention.backends.extend_schedule import (
    ExtendSchedule,
    TileShape,
    extend_schedule,
    heads_together,
)
from attention.backends.triton_extend_tuning import ExtendShape, extend_shape
from attention.interface import LatentExpansion
from attention.rows import ExtendRows

# Elements of the up-projected prefix of MLA that exist at once: 256 MiB in 16-bit types.
MAX_EXPANDED = 1 << 27

_LOG2_E = 1.4426950408889634
_FIELDS = 8
_MERGE_ROWS = 16
# What the interpreter, which has no SMs, cuts prefixes for.
_INTERPRETED_SMS = 4


@dataclass(frozen=True, slots=True)
class _Heads:
    """The query heads of each KV head. starts: [KV heads + 1], the first query head of each."""

    starts: tuple[int, ...]
    on_device: Tensor

    @staticmethod
    def of(kv_index: tuple[int, ...], device: torch.device) -> _Heads:
        """kv_index: KV head of each query head, counted from the first that is read."""
        counts = [kv_index.count(kv_head) for kv_head in range(kv_index[-1] + 1)]
        starts = tuple(accumulate(counts, initial=0))
        return _Heads(starts, torch.tensor(starts, dtype=torch.int32).to(device))

    @property
    def num_kv_heads(self) -> int:
        """KV heads from the first to the last that is read."""
        return len(self.starts) - 1

    @property
    def group(self) -> int:
        """Most query heads of a KV head."""
        return max(b - a for a, b in pairwise(self.starts))


class _Layer(NamedTuple):
    """One layer's call. results: out, then partial results and their lse, float32."""

    q: Tensor
    chunk: ExtendKeys
    results: tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all layers of the step share. tables: int32 of each launch's pieces, then of merges."""

    heads: _Heads
    shape: ExtendShape
    schedule: ExtendSchedule
    tables: tuple[Tensor, ...]


class TritonExtendKernel:
    """One step's extend attention. The first layer's call cuts the work and uploads the cuts."""

    def __init__(
        self,
        rows: ExtendRows,
        *,
        kv_index: tuple[int, ...],
        scale: float,
        deterministic: bool,
        device: torch.device,
        max_expanded: int = MAX_EXPANDED,
        shape_of: Callable[..., ExtendShape] = extend_shape,
    ) -> None:
        """deterministic: a sequence's result does not depend on its batch (in MLA as far as the
        up-projection's does not). max_expanded: elements of prefix that MLA expands at once.

        Raises ValueError for a kv_index that decreases or a scale that is not positive.
        """
        if list(kv_index) != sorted(kv_index):
            raise ValueError(f"kv_index {kv_index} must not decrease")
        if scale <= 0:
            raise ValueError(f"softmax scale {scale} must be positive")
        self._rows = rows
        self._kv_index = kv_index
        self._scale = scale
        self._deterministic = deterministic
        self._device = device
        self._max_expanded = max_expanded
        self._shape_of = shape_of
        self._plans: dict[tuple[bool, int, int], _Plan] = {}

    def gqa(
        self,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        prefix_key: Tensor | None,
        prefix_value: Tensor | None,
    ) -> Tensor:
        """See ExtendKernel."""
        out = q.new_empty(*q.shape[:2], value.shape[-1])
        if not out.numel():
            return out
        read = slice(self._kv_index[0], self._kv_index[-1] + 1)
        chunk = ExtendKeys(unit_stride(key[:, read]), unit_stride(value[:, read]), None)
        plan = self._plan(tuple(head - read.start for head in self._kv_index), chunk, None)
        layer = self._layer(plan, q, chunk, out)
        for i, launch in enumerate(plan.schedule.launches):
            prefix = chunk
            if prefix_key is not None and prefix_value is not None:
                key, value = (x[launch.prefix, read] for x in (prefix_key, prefix_value))
                prefix = ExtendKeys(unit_stride(key), unit_stride(value), None)
            # Prefixes may all be of sequences without a chunk: a descriptor of no rows is an error.
            self._launch(plan, i, layer, prefix if len(prefix.key) else chunk)
        self._merge(plan, layer)
        return out

    def mla(
        self, q: Tensor, latent: Tensor, prefix: Tensor | None, expansion: LatentExpansion
    ) -> Tensor:
        """See ExtendKernel."""
        out = q.new_empty(*q.shape[:2], expansion.w_vc.shape[-1])
        if not out.numel():
            return out
        chunk = expand_latent(latent, expansion)
        expanded_width = chunk.key[0].numel() + chunk.value[0].numel()
        plan = self._plan(tuple(range(q.shape[1])), chunk, self._max_expanded // expanded_width)
        layer = self._layer(plan, q, chunk, out)
        for i, launch in enumerate(plan.schedule.launches):
            rows = latent[:0] if prefix is None else prefix[launch.prefix]
            # No name keeps the expanded rows: the next ones take their memory.
            self._launch(plan, i, layer, expand_latent(rows, expansion) if len(rows) else chunk)
        self._merge(plan, layer)
        return out

    def _plan(self, kv_index: tuple[int, ...], chunk: ExtendKeys, max_prefix: int | None) -> _Plan:
        """The plan, made once a step. max_prefix: rows of a launch's prefix."""
        widths = chunk.widths
        made_for = (chunk.pe is None, widths["DIM"], widths["VALUE"])
        if made_for not in self._plans:
            heads = _Heads.of(kv_index, self._device)
            key_width = widths["DIM_PAD"] + (widths["PE_PAD"] if widths["PE"] else 0)
            longest = max(self._rows.chunk_lens) * heads.group
            shape = self._shape_of(
                rows=longest if not self._deterministic else 1 << 20,
                width=max(key_width, widths["VALUE_PAD"]),
                itemsize=chunk.key.element_size(),
                is_hopper=_is_hopper(self._device),
            )
            schedule = self._schedule(heads, shape, max_prefix)
            self._plans[made_for] = _Plan(heads, shape, schedule, self._upload(schedule))
        return self._plans[made_for]

    def _schedule(
        self, heads: _Heads, shape: ExtendShape, max_prefix: int | None
    ) -> ExtendSchedule:
        if max_prefix is not None:
            max_prefix = max(1, max_prefix // shape.block_keys) * shape.block_keys
        return extend_schedule(
            self._rows.prefix_lens,
            self._rows.chunk_lens,
            shape=TileShape(
                group=heads.group,
                block_rows=shape.block_rows,
                block_keys=shape.block_keys,
                num_kv_heads=heads.num_kv_heads,
            ),
            max_programs=0 if self._deterministic else self._max_programs(shape),
            max_prefix=max_prefix,
        )

    def _max_programs(self, shape: ExtendShape) -> int:
        return _num_sms(self._device) * shape.programs_per_sm

    def _upload(self, schedule: ExtendSchedule) -> tuple[Tensor, ...]:
        """One copy for all tables."""
        tables = [[tuple(piece) for piece in launch.pieces] for launch in schedule.launches]
        tables.append([(*merge, 0, 0, 0) for merge in schedule.merges])
        flat = torch.tensor([row for table in tables for row in table], dtype=torch.int32)
        on_device = flat.view(-1, _FIELDS).to(self._device)
        return torch.split(on_device, [len(table) for table in tables])

    def _layer(self, plan: _Plan, q: Tensor, chunk: ExtendKeys, out: Tensor) -> _Layer:
        rows = (plan.schedule.num_slots, plan.heads.num_kv_heads, plan.shape.block_rows)
        part_out = torch.empty(*rows, out.shape[-1], dtype=torch.float32, device=self._device)
        part_lse = torch.empty(rows, dtype=torch.float32, device=self._device)
        return _Layer(unit_stride(q), chunk, (out, part_out, part_lse))

    def _launch(self, plan: _Plan, index: int, layer: _Layer, prefix: ExtendKeys) -> None:
        q, chunk, results = layer
        heads, shape, launch = plan.heads, plan.shape, plan.schedule.launches[index]
        num_pieces, num_kv_heads = len(launch.pieces), heads.num_kv_heads
        tensors = (*prefix.parts, *chunk.parts)
        has_tma = shape.tma and _has_tma(self._device) and all(map(can_copy, tensors))
        tiles: Sequence[object] = tensors
        if has_tma:
            tiles = [triton_extend_kernels.row_tiles(part, shape.block_keys) for part in tensors]
        triton_extend_kernels.extend_attention[(num_pieces * num_kv_heads,)](
            q,
            *results,
            plan.tables[index],
            heads.on_device,
            *tensors,
            *tiles,
            q.stride(0),
            q.stride(1),
            *prefix.strides,
            *chunk.strides,
            self._scale * _LOG2_E,
            num_pieces,
            heads_together(num_pieces, num_kv_heads, self._max_programs(shape)),
            q.shape[1],
            num_kv_heads,
            heads.group,
            **chunk.widths,
            BLOCK_ROWS=shape.block_rows,
            BLOCK_KEYS=shape.block_keys,
            CARRIES=launch.carries,
            TMA=has_tma,
            STAGES=shape.num_stages,
            num_warps=shape.num_warps,
        )

    def _merge(self, plan: _Plan, layer: _Layer) -> None:
        heads, merges = plan.heads, plan.schedule.merges
        out = layer.results[0]
        if not merges:
            return
        grid = (len(merges), heads.num_kv_heads, plan.shape.block_rows // _MERGE_ROWS)
        triton_extend_kernels.merge_pieces[grid](
            *layer.results,
            plan.tables[-1],
            heads.on_device,
            out.shape[1],
            heads.num_kv_heads,
            heads.group,
            VALUE=out.shape[-1],
            VALUE_PAD=padded_width(out.shape[-1]),
            BLOCK_ROWS=plan.shape.block_rows,
            ROWS=_MERGE_ROWS,
            num_warps=4,
        )


@lru_cache
def _num_sms(device: torch.device) -> int:
    if device.type == "cpu":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    if device.type == "cpu" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache
def _has_tma(device: torch.device) -> bool:
    """Hopper and newer; the interpreter, too, knows descriptors."""
    if device.type == "cpu":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
