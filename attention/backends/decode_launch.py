"""Which kernel serves a decode step, and in which launch shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from attention.backends import triton_kernels
from attention.backends.device_plan import BLOCK_KEYS, SplitLimits
from attention.backends.triton_tuning import FP8_IN_FLOAT32, LaunchShape, fitted, launch_shape
from attention.rows import DecodeBounds, DecodeRows

# What the interpreter, which has no SMs, splits for.
_INTERPRETED_SMS = 4
_INTERPRETED_SHARED_MEMORY = 227 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyForm:
    """What the choice depends on of q and the pool. row_stride: elements from row to row.

    dim: columns of a key that are also the value's width; pe: those behind them, 0 for GQA.
    """

    is_mla: bool
    dim: int
    pe: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    row_stride: int


class DecodeLaunch:
    """Launch shapes of a step, or of all steps within bounds, for which the shape is the same."""

    def __init__(
        self, rows: DecodeRows | DecodeBounds, kv_index: Sequence[int], device: torch.device
    ) -> None:
        """kv_index: KV head of each query head. Raises ValueError where it decreases."""
        self.rows = rows
        self.device = device
        self.head_starts = head_starts(kv_index)
        self.num_heads = len(kv_index)
        self.num_kv_heads = len(self.head_starts) - 1
        self.group_size = max((b - a for a, b in pairwise(self.head_starts)), default=0)
        self._shapes: dict[KeyForm, LaunchShape] = {}

    def shape(self, form: KeyForm) -> LaunchShape:
        """The launch shape for this q and pool: chosen once, not once a layer."""
        shape = self._shapes.get(form)
        if shape is None:
            shape = self._shapes[form] = self._choose(form)
        return shape

    def _choose(self, form: KeyForm) -> LaunchShape:
        if form.kv_dtype.itemsize == 1 and form.dtype.itemsize > 2:
            return FP8_IN_FLOAT32
        shape = launch_shape(
            is_mla=form.is_mla,
            rows=self.rows.window * self.group_size,
            keys=self.rows.num_keys,
            window=self.rows.window,
            dim=form.dim,
            # Of the products, unless 8-bit pools have a kernel of their own.
            itemsize=(form.kv_dtype if self.has_pairs(form) else form.dtype).itemsize,
            has_gluon=self._has_gluon(form),
            has_wide=self._has_wide(form),
        )
        return fitted(shape, shared_memory(self.device))

    def limits(self, shape: LaunchShape) -> SplitLimits:
        """What this shape asks of the plan."""
        programs = num_sms(self.device) * shape.programs_per_sm
        return SplitLimits(max(1, programs // max(1, self.num_row_blocks(shape))), shape.min_blocks)

    def num_row_blocks(self, shape: LaunchShape) -> int:
        """Programs that work through the same keys."""
        return self.num_kv_heads * -(-self.rows.window * self.group_size // shape.block_rows)

    def has_pairs(self, form: KeyForm) -> bool:
        """Whether triton_fp8_kernel serves this pool: pairs of columns, products in 16 bits."""
        return (
            form.kv_dtype.itemsize == 1
            and form.dtype.itemsize == 2
            and form.dim % 2 == form.pe % 2 == form.row_stride % 2 == 0
            and (self.device.type == "cpu" or unpacks_fp8(self.device))
        )

    def _has_gluon(self, form: KeyForm) -> bool:
        """Whether a Hopper kernel serves this pool: of MLA, rows without gaps, and in 16-bit types
        powers of two. The one for 8-bit pools has no window."""
        if not (
            form.is_mla
            and triton_kernels.HAS_GLUON
            and is_hopper(self.device)
            and form.dtype.itemsize == 2
            and form.row_stride == form.dim + form.pe
        ):
            return False
        if form.kv_dtype.itemsize == 1:
            return self._has_latent_tiles(form) and self.rows.window == 1
        return (
            form.dim in (64, 128, 256, 512)
            and form.pe in (16, 32, 64)
            and self.rows.window <= BLOCK_KEYS
        )

    def _has_wide(self, form: KeyForm) -> bool:
        """Whether the Hopper kernel for many rows serves it."""
        return (
            self._has_gluon(form) and form.kv_dtype.itemsize == 2 and self._has_latent_tiles(form)
        )

    def _has_latent_tiles(self, form: KeyForm) -> bool:
        """The one latent width, in pages of tiles, that some of the Hopper kernels are for."""
        return (form.dim, form.pe) == (512, 64) and self.rows.page_size % BLOCK_KEYS == 0


def head_starts(kv_index: Sequence[int]) -> list[int]:
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
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that Triton lets a program have; as on Hopper in the interpreter."""
    if device.type == "cpu":
        return _INTERPRETED_SHARED_MEMORY
    index = torch.cuda.current_device() if device.index is None else device.index
    return triton_kernels.max_shared_memory(index)


@lru_cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one that it depends on has ended (Hopper on)."""
    if device.type == "cpu" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device has the warpgroup products of compute capability 9.0."""
    if device.type == "cpu" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache
def unpacks_fp8(device: torch.device) -> bool:
    """Whether the device has instructions that convert e4m3 numbers (Ada on)."""
    if device.type == "cpu" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def launch_options(device: torch.device) -> dict[str, bool]:
    """PDL, for which kernels are compiled, and the launch option that goes with it."""
    return {"PDL": True, "launch_pdl": True} if has_dependent_launch(device) else {"PDL": False}
