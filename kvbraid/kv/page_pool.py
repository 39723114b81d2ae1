"""One rank's stripe of the KV cache, and the only door from logical slots to physical rows.

Symbols: N pages, P page_size, T tokens, Hk KV heads of this rank, L layers, W row width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.interface import GQACache, MLACache
from attention.layout import StripeLayout
from kvbraid.kv.kv_layout import KINDS
from kvbraid.kv.slots import LogicalSlots, PhysicalRows, local_indices, owners_of

_ROW_BYTES = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class KvSpec:
    """What one rank stores of a token. Raises ValueError for impossible values.

    num_heads: KV heads of this rank (1 for MLA; 0 for a rank without query heads).
    key_width, value_width: elements of one head; for MLA latent + rope, and 0.
    """

    kind: str
    num_layers: int
    num_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r} must be one of {KINDS}")
        if self.kind == "mla" and (self.num_heads > 1 or self.value_width):
            raise ValueError(
                f"mla takes one head and value_width 0, got {self.num_heads} and {self.value_width}"
            )
        if self.num_layers < 1 or self.num_heads < 0 or self.key_width < 1 or self.value_width < 0:
            raise ValueError(f"sizes must be positive, got {self}")
        if self.dtype.itemsize not in _ROW_BYTES:
            raise ValueError(f"dtype {self.dtype} must have 1, 2 or 4 bytes")

    @property
    def row_width(self) -> int:
        """Elements of one row: one layer, one position, one head; key, then value."""
        return self.key_width + self.value_width

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.row_width * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class WritePlan:
    """Where a step's tokens go in every layer.

    owned: int64 [n], indices of this rank's tokens among the T; None when it owns all of them.
    rows: int64 [n], their physical rows.
    """

    num_tokens: int
    owned: Tensor | None
    rows: Tensor


class StripedPagePool:
    """KV pages of one rank. Logical page k is physical page k on every rank of the group; this
    rank keeps P of its P * c tokens. Page 0 is never allocated: padded writes go there.

    Not thread-safe: the engine thread alone uses it.
    """

    def __init__(
        self, spec: KvSpec, num_pages: int, stripe: StripeLayout, device: torch.device | str
    ) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages {num_pages} must be >= 2: page 0 is the sink")
        self.spec = spec
        self.num_pages = num_pages
        self.stripe = stripe
        self.device = torch.device(device)
        widths = [spec.key_width, spec.value_width] if spec.kind == "gqa" else [spec.key_width]
        num_rows = num_pages * stripe.page_size
        # [L, N * P, Hk, width], one for keys (or latents) and one for values
        self._stores = [
            torch.zeros(
                spec.num_layers, num_rows, spec.num_heads, width, dtype=spec.dtype, device=device
            )
            for width in widths
        ]
        # fp8 has no index operations: its rows are moved as bytes.
        self._move_dtype = torch.uint8 if spec.dtype.itemsize == 1 else spec.dtype
        self._moved = [store.view(self._move_dtype) for store in self._stores]
        self._layers = [[moved[i] for moved in self._moved] for i in range(spec.num_layers)]

    @property
    def num_slots(self) -> int:
        """Legal logical slots are [0, num_slots): widened by c, the sink page included."""
        return self.num_pages * self.stripe.logical_page_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages, the sink included."""
        return sum(store.numel() * store.element_size() for store in self._stores)

    def layer(self, layer: int) -> GQACache | MLACache:
        """One layer's cache as attention reads it: views, never copies."""
        pages = (self.num_pages, self.stripe.page_size)
        if self.spec.kind == "mla":
            return MLACache(self._stores[0][layer].view(*pages, -1))
        key, value = (store[layer].view(*pages, *store.shape[2:]) for store in self._stores)
        return GQACache(key, value)

    def write_plan(self, slots: LogicalSlots) -> WritePlan:
        """Plan of a step's writes; the owner filter and the division happen here.

        slots: one a token, padding tokens in page 0. Build it once a step, use it in every layer.
        Raises TypeError for anything but LogicalSlots, ValueError for a slot outside the pool.
        """
        ids = self._checked(slots)
        if self.stripe.dcp_size == 1:
            return WritePlan(len(ids), None, self._to_device(local_indices(self.stripe, ids)))
        owned = np.flatnonzero(owners_of(self.stripe, ids) == self.stripe.dcp_rank)
        rows = local_indices(self.stripe, ids[owned])
        return WritePlan(len(ids), self._to_device(owned), self._to_device(rows))

    def write(self, layer: int, plan: WritePlan, *rows: Tensor) -> None:
        """Store a step's rows of one layer; rows that this rank does not own are not read.

        rows: key and value [T, Hk, width], or one latent [T, R + Rr]; converted to the pool's
        dtype. Raises ValueError when their number or length is not the plan's.
        """
        if not isinstance(plan, WritePlan):
            raise TypeError(f"write takes a WritePlan, got {type(plan).__name__}")
        if len(rows) != len(self._stores):
            raise ValueError(f"{self.spec.kind} takes {len(self._stores)} tensors, got {len(rows)}")
        for target, tensor in zip(self._layers[layer], rows, strict=True):
            if len(tensor) != plan.num_tokens:
                raise ValueError(f"plan is for {plan.num_tokens} tokens, got {len(tensor)} rows")
            owned = tensor if plan.owned is None else tensor.index_select(0, plan.owned)
            if owned.dtype != self._move_dtype:
                owned = owned.to(self.spec.dtype).view(self._move_dtype)
            target.index_copy_(0, plan.rows, owned.view(len(plan.rows), *target.shape[1:]))

    def gather(self, slots: LogicalSlots, layers: range, heads: range) -> Tensor:
        """Copy rows out: [len(layers), n, len(heads), row_width], key then value.

        heads: indices into this rank's heads. Every slot must be owned by this rank.
        Raises TypeError for anything but LogicalSlots, ValueError for foreign or bad slots.
        """
        rows = self._to_device(self._owned_rows(slots).array)
        self._check_ranges(layers, heads)
        parts = [moved[layers.start : layers.stop] for moved in self._moved]
        if len(heads) == self.spec.num_heads:
            parts = [part.index_select(1, rows) for part in parts]
        else:
            parts = [part[:, rows, heads.start : heads.stop] for part in parts]
        packed = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0].contiguous()
        return packed.view(self.spec.dtype)

    def scatter(self, slots: LogicalSlots, layers: range, heads: range, packed: Tensor) -> None:
        """Copy rows in; the reverse of `gather`, with the same errors.

        packed: [len(layers), n, len(heads), row_width] of the pool's dtype.
        """
        rows = self._to_device(self._owned_rows(slots).array)
        self._check_ranges(layers, heads)
        shape = (len(layers), len(rows), len(heads), self.spec.row_width)
        if packed.shape != shape or packed.dtype != self.spec.dtype:
            raise ValueError(
                f"packed must be {shape} {self.spec.dtype}, "
                f"got {tuple(packed.shape)} {packed.dtype}"
            )
        source = packed.to(self.device).view(self._move_dtype)
        widths = [moved.shape[-1] for moved in self._moved]
        for moved, part in zip(self._moved, torch.split(source, widths, dim=-1), strict=True):
            target = moved[layers.start : layers.stop, :, heads.start : heads.stop]
            target.index_copy_(1, rows, part)

    def packed_from_bytes(self, payload: memoryview, num_layers: int, num_heads: int) -> Tensor:
        """View `payload` as rows for `scatter`: [num_layers, n, num_heads, row_width].

        No copy: the tensor is valid as long as the (writable) buffer. Raises ValueError when the
        size is not a whole number of positions.
        """
        position_bytes = num_layers * num_heads * self.spec.row_bytes
        if not position_bytes or payload.nbytes % position_bytes:
            raise ValueError(
                f"{payload.nbytes} bytes are not rows of {num_layers} layers, {num_heads} heads "
                f"of {self.spec.row_bytes} bytes"
            )
        flat = torch.frombuffer(payload, dtype=torch.uint8)
        return flat.view(self.spec.dtype).view(num_layers, -1, num_heads, self.spec.row_width)

    def fill_nan(self) -> None:
        """Poison every row, so that a test notices when one is read unwritten."""
        for store in self._stores:
            store.fill_(float("nan"))

    def count_finite_rows(self, slots: LogicalSlots | None = None) -> int:
        """Rows (layer x slot x head) without NaN or infinity, among `slots` (all owned) or all."""
        stores: Sequence[Tensor] = self._stores
        if slots is not None:
            rows = self._to_device(self._owned_rows(slots).array)
            stores = [store[:, rows] for store in stores]
        finite = [store.float().isfinite().all(dim=-1) for store in stores]
        return int(torch.stack(finite).all(dim=0).sum())

    def _owned_rows(self, slots: LogicalSlots) -> PhysicalRows:
        ids = self._checked(slots)
        foreign = ids[owners_of(self.stripe, ids) != self.stripe.dcp_rank]
        if len(foreign):
            raise ValueError(
                f"slot {foreign[0]} and {len(foreign) - 1} others are not owned by "
                f"dcp rank {self.stripe.dcp_rank} of {self.stripe.dcp_size}"
            )
        return PhysicalRows(local_indices(self.stripe, ids))

    def _checked(self, slots: LogicalSlots) -> NDArray[np.int64]:
        if not isinstance(slots, LogicalSlots):
            raise TypeError(f"the pool takes LogicalSlots, got {type(slots).__name__}")
        ids = slots.array
        if len(ids) and (ids.min() < 0 or ids.max() >= self.num_slots):
            raise ValueError(f"slots {ids.min()}..{ids.max()} are outside [0, {self.num_slots})")
        return ids

    def _check_ranges(self, layers: range, heads: range) -> None:
        for name, part, size in _named_ranges(layers, heads, self.spec):
            if part.step != 1 or not 0 <= part.start <= part.stop <= size:
                raise ValueError(f"{name} {part} is outside [0, {size})")

    def _to_device(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _named_ranges(layers: range, heads: range, spec: KvSpec) -> Iterator[tuple[str, range, int]]:
    yield "layers", layers, spec.num_layers
    yield "heads", heads, spec.num_heads
