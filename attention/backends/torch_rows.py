"""Rows of a KV pool moved by stock torch operators: the way on CPU, and the kernels' oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.kv_rows import (
    FP8_MAX,
    MIN_AMAX,
    Rotation,
    RowStore,
    WritePlan,
    on_device,
    padded_slots,
    part_spans,
)
from attention.layout import StripeLayout


@dataclass(slots=True, eq=False)
class OwnedRows(WritePlan):
    """owned: int64 [n], indices of this rank's tokens among the T; None when it owns all of them.
    rows: int64 [n], their physical rows."""

    owned: Tensor | None
    rows: Tensor


class TorchRows:
    """Implements attention.kv_rows.RowMover."""

    def __init__(self, stores: Sequence[RowStore], stripe: StripeLayout) -> None:
        self._stores = stores
        self._stripe = stripe
        self._dtype = stores[0].rows.dtype
        self._device = stores[0].rows.device
        # fp8 has no index operations: its rows are moved as bytes.
        self._move_dtype = torch.uint8 if self._dtype.itemsize == 1 else self._dtype
        self._moved = [store.rows.view(self._move_dtype) for store in stores]
        num_layers = len(stores[0].rows)
        self._layers = [[moved[i] for moved in self._moved] for i in range(num_layers)]

    def plan(self, slots: NDArray[np.int64]) -> OwnedRows:
        """See RowMover."""
        if self._stripe.dcp_size == 1:
            return OwnedRows(len(slots), None, on_device(self._stripe.row(slots), self._device))
        owned = np.flatnonzero(self._stripe.owner(slots) == self._stripe.dcp_rank)
        rows = self._stripe.row(slots[owned])
        return OwnedRows(len(slots), on_device(owned, self._device), on_device(rows, self._device))

    def refill(self, plan: WritePlan, slots: NDArray[np.int64]) -> None:
        """See RowMover; but of a stripe the number of owned rows changes, and the memory too."""
        plan = _checked(plan)
        fresh = self.plan(padded_slots(slots, plan.num_tokens))
        if fresh.owned is None:
            plan.rows.copy_(fresh.rows)
        else:
            plan.owned, plan.rows = fresh.owned, fresh.rows

    def parts(self, plan: WritePlan, size: int) -> list[WritePlan]:
        """See RowMover."""
        rows = _checked(plan).rows
        return [OwnedRows(size, None, rows[span]) for span in part_spans(plan, size, self._stripe)]

    def append(
        self, layer: int, plan: WritePlan, rows: Sequence[Tensor], rotation: Rotation | None = None
    ) -> None:
        """See RowMover."""
        plan = _checked(plan)
        owned = [_select(tensor, plan.owned) for tensor in rows]
        is_latent = len(self._stores) == 1
        if rotation is not None:
            owned[int(is_latent)] = _rotated(owned[int(is_latent)], rotation, plan.owned)
        if is_latent and len(rows) == 2:
            owned = [torch.cat(owned, dim=-1)]
        for store, target, tensor in zip(self._stores, self._layers[layer], owned, strict=True):
            shaped = tensor.reshape(len(plan.rows), *target.shape[1:])
            if store.scale is not None:
                shaped = _scaled(shaped, store.scale[layer], plan.rows)
            target.index_copy_(0, plan.rows, self._converted(shaped))

    def gather(self, rows: Tensor, layers: range, heads: range) -> Tensor:
        """See RowMover."""
        parts = [moved[layers.start : layers.stop] for moved in self._moved]
        if len(heads) == self._moved[0].shape[2]:
            parts = [part.index_select(1, rows) for part in parts]
        else:
            parts = [part[:, rows, heads.start : heads.stop] for part in parts]
        packed = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0].contiguous()
        return packed.view(self._dtype)

    def scatter(self, rows: Tensor, layers: range, heads: range, packed: Tensor) -> None:
        """See RowMover."""
        widths = [moved.shape[-1] for moved in self._moved]
        parts = torch.split(packed.view(self._move_dtype), widths, dim=-1)
        for moved, part in zip(self._moved, parts, strict=True):
            target = moved[layers.start : layers.stop, :, heads.start : heads.stop]
            target.index_copy_(1, rows, part)

    def _converted(self, rows: Tensor) -> Tensor:
        if rows.dtype == self._dtype:
            return rows.view(self._move_dtype)
        if self._dtype == torch.float8_e4m3fn:
            rows = rows.float().clamp(-FP8_MAX, FP8_MAX)
        return rows.to(self._dtype).view(self._move_dtype)


def _checked(plan: WritePlan) -> OwnedRows:
    if not isinstance(plan, OwnedRows):
        raise TypeError(f"the torch mover takes OwnedRows, got {type(plan).__name__}")
    return plan


def _select(tensor: Tensor, owned: Tensor | None) -> Tensor:
    return tensor if owned is None else tensor.index_select(0, owned)


def _scaled(rows: Tensor, scale: Tensor, targets: Tensor) -> Tensor:
    """float32 rows divided by scale: [1], or [N, Hk, P], where a row's own is written first."""
    rows = rows.float()
    if scale.dim() == 1:
        return rows / scale
    # [n, Hk]
    own = rows.abs().amax(dim=-1).clamp(min=MIN_AMAX) * (1.0 / FP8_MAX)
    page_size = scale.shape[-1]
    scale.transpose(1, 2)[targets // page_size, targets % page_size] = own
    return rows / own[..., None]


def _rotated(keys: Tensor, rotation: Rotation, owned: Tensor | None) -> Tensor:
    """keys [n, Hk, W] or [n, W] -> float32 of that shape."""
    positions = _select(rotation.positions, owned).long()
    cos, sin = (table.index_select(0, positions).float() for table in (rotation.cos, rotation.sin))
    if keys.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    keys = keys.float()
    turned, rest = keys[..., : rotation.dim], keys[..., rotation.dim :]
    if rotation.is_interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        pairs = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((pairs, rest), dim=-1)
