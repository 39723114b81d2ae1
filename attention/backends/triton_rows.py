"""Rows of a KV pool moved by Triton kernels: one launch a layer, one a gather or scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.backends import triton_rows_kernels as kernels
from attention.kv_rows import (
    Rotation,
    RowStore,
    WritePlan,
    on_device,
    padded_slots,
    part_spans,
)
from attention.layout import StripeLayout

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
# Numbers of a program of the append kernel, and words of one of the move kernel.
_BLOCK_NUMBERS = 2048
_BLOCK_WORDS = 1024
# The move kernel counts the words of a layer in 32 bits.
_MAX_WORDS = 2**31 - _BLOCK_WORDS


@dataclass(slots=True, eq=False)
class DeviceSlots(WritePlan):
    """slots: int64 [num_tokens] on the device, logical: the kernel alone filters and divides."""

    slots: Tensor


class _Parts(NamedTuple):
    """Key and value of a step's rows, [T, (Hk,) W] with numbers in a line. In MLA the key is the
    tail of the row from `key_column` on."""

    key: Tensor
    value: Tensor
    key_column: int


class TritonRows:
    """Implements attention.kv_rows.RowMover. A captured `append` replays with a refilled plan."""

    def __init__(self, stores: Sequence[RowStore], stripe: StripeLayout) -> None:
        self._stores = stores
        self._device = stores[0].rows.device
        self._dtype = stores[0].rows.dtype
        self._is_latent = len(stores) == 1
        self._widths = [store.rows.shape[-1] for store in stores]
        self._num_layers, self._rows_per_layer, self._num_heads, _ = stores[0].rows.shape
        self._stripe = stripe
        self._rank = stripe.dcp_rank
        self._layers = [[_layer(store, i) for store in stores] for i in range(self._num_layers)]
        word = _word(self._dtype.itemsize, self._widths)
        self._words = [store.rows.view(word) for store in stores]
        self._word = word
        self._constants: dict[str, Any] = {
            "NUM_HEADS": self._num_heads,
            "KEY_STRIDE": self._widths[0],
            "VALUE_STRIDE": self._widths[-1],
            "DCP_SIZE": stripe.dcp_size,
            "INTERLEAVE": stripe.interleave,
            "HAS_SCALE": stores[0].scale is not None,
            "PER_TOKEN": stores[0].is_per_token,
            "PAGE_SIZE": stripe.page_size if stores[0].is_per_token else 1,
            "ONE_STORE": self._is_latent,
            "num_warps": 4,
            # Without fused multiply-adds a rotation is bit for bit that of the torch mover.
            "enable_fp_fusion": False,
        }

    def plan(self, slots: NDArray[np.int64]) -> DeviceSlots:
        """See RowMover. One upload."""
        return DeviceSlots(len(slots), on_device(slots, self._device))

    def refill(self, plan: WritePlan, slots: NDArray[np.int64]) -> None:
        """See RowMover."""
        plan = _checked(plan)
        # From ordinary memory the host would wait for all that the device still has to do.
        staging = torch.empty(
            plan.num_tokens, dtype=torch.int64, pin_memory=plan.slots.device.type == "cuda"
        )
        staging.numpy()[:] = padded_slots(slots, plan.num_tokens)
        plan.slots.copy_(staging, non_blocking=True)

    def parts(self, plan: WritePlan, size: int) -> list[WritePlan]:
        """See RowMover."""
        slots = _checked(plan).slots
        return [DeviceSlots(size, slots[span]) for span in part_spans(plan, size, self._stripe)]

    def append(
        self, layer: int, plan: WritePlan, rows: Sequence[Tensor], rotation: Rotation | None = None
    ) -> None:
        """See RowMover. One launch, without memory of its own."""
        slots = _checked(plan).slots
        num_rows = len(slots) * self._num_heads
        if not num_rows:
            return
        parts = self._parts(rows)
        key_pad, value_pad = (_power_of_two(part.shape[-1]) for part in parts[:2])
        block_rows = max(1, _BLOCK_NUMBERS // max(key_pad, value_pad))
        stores = self._layers[layer]
        positions, cos, sin = (
            (rotation.positions, rotation.cos.contiguous(), rotation.sin.contiguous())
            if rotation
            else (None, None, None)
        )
        kernels.append_rows[(-(-num_rows // block_rows),)](
            slots,
            parts.key,
            parts.value,
            stores[0].rows,
            stores[-1].rows,
            stores[0].scale,
            stores[-1].scale,
            positions,
            cos,
            sin,
            num_rows,
            self._rank,
            *_token_and_head_stride(parts.key),
            *_token_and_head_stride(parts.value),
            KEY_WIDTH=parts.key.shape[-1],
            VALUE_WIDTH=parts.value.shape[-1],
            KEY_COLUMN=parts.key_column,
            ROTARY_DIM=rotation.dim if rotation else 0,
            ROTARY_INTERLEAVED=bool(rotation and rotation.is_interleaved),
            KEY_PAD=key_pad,
            VALUE_PAD=value_pad,
            BLOCK_ROWS=block_rows,
            **self._constants,
        )

    def gather(self, rows: Tensor, layers: range, heads: range) -> Tensor:
        """See RowMover."""
        packed = torch.empty(
            (len(layers), len(rows), len(heads), sum(self._widths)),
            dtype=self._dtype,
            device=self._device,
        )
        self._move(rows, layers, heads, packed, into_pool=False)
        return packed

    def scatter(self, rows: Tensor, layers: range, heads: range, packed: Tensor) -> None:
        """See RowMover."""
        self._move(rows, layers, heads, packed, into_pool=True)

    def _move(
        self, rows: Tensor, layers: range, heads: range, packed: Tensor, *, into_pool: bool
    ) -> None:
        if not packed.numel():
            return
        widths = [words.shape[-1] for words in self._words]
        num_words = len(rows) * len(heads) * max(widths)
        if num_words > _MAX_WORDS:
            raise ValueError(f"{num_words} words of a layer are above {_MAX_WORDS} in one move")
        kernels.move_rows[(-(-num_words // _BLOCK_WORDS), len(layers), len(widths))](
            self._words[0],
            self._words[-1],
            packed.view(self._word),
            rows,
            len(rows),
            layers.start,
            heads.start,
            self._rows_per_layer,
            INTO_POOL=into_pool,
            NUM_HEADS=self._num_heads,
            HEADS=len(heads),
            KEY_WORDS=widths[0],
            VALUE_WORDS=0 if self._is_latent else widths[1],
            BLOCK=_BLOCK_WORDS,
            num_warps=4,
        )

    def _parts(self, rows: Sequence[Tensor]) -> _Parts:
        """Key and value for the kernel. A joined latent is cut at a power of two: 576 numbers as
        512 and 64 fill their tiles, as one run they would fill half of 1024."""
        if not self._is_latent:
            return _Parts(_in_line(rows[0]), _in_line(rows[1]), 0)
        if len(rows) == 2:
            return _Parts(_in_line(rows[1]), _in_line(rows[0]), rows[0].shape[1])
        joined = _in_line(rows[0])
        head = 1 << (joined.shape[1].bit_length() - 1)
        return _Parts(joined[:, head:], joined[:, :head], head)


def _checked(plan: WritePlan) -> DeviceSlots:
    if not isinstance(plan, DeviceSlots):
        raise TypeError(f"the triton mover takes DeviceSlots, got {type(plan).__name__}")
    return plan


def _layer(store: RowStore, layer: int) -> RowStore:
    return RowStore(store.rows[layer], None if store.scale is None else store.scale[layer])


def _word(itemsize: int, widths: Sequence[int]) -> torch.dtype:
    """The widest integer that rows of these widths are whole numbers of."""
    return next(w for w in _WORDS if all(n * itemsize % w.itemsize == 0 for n in widths))


def _in_line(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _token_and_head_stride(rows: Tensor) -> tuple[int, int]:
    return rows.stride(0), rows.stride(1) if rows.dim() == 3 else 0


def _power_of_two(width: int) -> int:
    """The least that holds `width`."""
    return 1 << max(0, width - 1).bit_length()
