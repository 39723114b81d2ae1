"""One rank's stripe of the KV cache, and the only door from logical slots to physical rows.

Symbols: N pages, P page_size, T tokens, Hk KV heads of this rank, L layers, W row width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.interface import GQACache, MLACache
from attention.kv_rows import Rotation, RowStore, WritePlan, check_rows, on_device, row_mover
from attention.layout import StripeLayout
from kvbraid.kv.kv_layout import KINDS
from kvbraid.kv.slots import LogicalSlots, PhysicalRows, local_indices, owners_of

_ROW_BYTES = (1, 2, 4)
SCALE_MODES = ("none", "per_tensor", "per_token")


@dataclass(frozen=True, slots=True)
class KvSpec:
    """What one rank stores of a token. Raises ValueError for impossible values.

    num_heads: KV heads of this rank (1 for MLA; 0 for a rank without query heads).
    key_width, value_width: elements of one head; for MLA latent + rope, and 0.
    scale_mode: of float8_e4m3fn: none, per_tensor (one a layer, given) or per_token (one a row,
        computed as it is written). Keys and values have scales of their own.
    """

    kind: str
    num_layers: int
    num_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    scale_mode: str = "none"

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
        if self.scale_mode not in SCALE_MODES:
            raise ValueError(f"scale_mode {self.scale_mode!r} must be one of {SCALE_MODES}")
        if self.scale_mode != "none" and self.dtype != torch.float8_e4m3fn:
            raise ValueError(
                f"scale_mode {self.scale_mode!r} needs float8_e4m3fn, not {self.dtype}"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of a head in each of the pool's stores: keys and values, or latents."""
        return (self.key_width, self.value_width) if self.kind == "gqa" else (self.key_width,)

    @property
    def row_width(self) -> int:
        """Elements of one row: one layer, one position, one head; key, then value."""
        return self.key_width + self.value_width

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.row_width * self.dtype.itemsize

    def check_movable(self) -> None:
        """Raises ValueError where a row is not all that its reader needs."""
        if self.scale_mode == "per_token":
            raise ValueError(
                "rows of a per_token fp8 pool cannot be moved: a row does not carry its scale"
            )


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
        self._stores = [self._new_store(width) for width in spec.widths]
        # What `scale` of the stores holds, where that is a number a layer: never read back.
        self._host_scales: list[tuple[float, ...] | None] = [
            (1.0,) * len(self._stores) if spec.scale_mode == "per_tensor" else None
        ] * spec.num_layers
        self._mover = row_mover(self._stores, stripe)

    def _new_store(self, width: int) -> RowStore:
        spec, page_size = self.spec, self.stripe.page_size
        shape = (spec.num_layers, self.num_pages * page_size, spec.num_heads, width)
        rows = torch.zeros(shape, dtype=spec.dtype, device=self.device)
        if spec.scale_mode == "none":
            return RowStore(rows)
        per_layer: tuple[int, ...] = (1,)
        if spec.scale_mode == "per_token":
            per_layer = (self.num_pages, spec.num_heads, page_size)
        return RowStore(rows, torch.ones(spec.num_layers, *per_layer, device=self.device))

    @property
    def num_slots(self) -> int:
        """Legal logical slots are [0, num_slots): widened by c, the sink page included."""
        return self.num_pages * self.stripe.logical_page_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages and scales, the sink included."""
        tensors = [tensor for store in self._stores for tensor in (store.rows, store.scale)]
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def set_scales(self, layer: int, *scales: float) -> None:
        """The scales of one layer of a per_tensor pool: key and value, or latent; 1 until set.

        Set them before the layer's first write. Raises ValueError for other pools and numbers.
        """
        if self.spec.scale_mode != "per_tensor" or len(scales) != len(self._stores):
            raise ValueError(
                f"{len(scales)} scales for {len(self._stores)} stores, {self.spec.scale_mode}"
            )
        if not all(0 < scale < math.inf for scale in scales):
            raise ValueError(f"scales {scales} must be positive and finite")
        for store, scale in zip(self._stores, scales, strict=True):
            if store.scale is not None:
                store.scale[layer].fill_(scale)
        self._host_scales[layer] = tuple(torch.tensor(scales).tolist())

    def layer(self, layer: int) -> GQACache | MLACache:
        """One layer's cache as attention reads it: views, never copies."""
        pages = (self.num_pages, self.stripe.page_size)
        rows = [store.rows[layer] for store in self._stores]
        host = self._host_scales[layer]
        if self.spec.kind == "mla":
            scale = self._stores[0].scale
            if scale is not None:
                scale = scale[layer].view(pages if self._stores[0].is_per_token else (1,))
            return MLACache(rows[0].view(*pages, -1), scale, None if host is None else host[0])
        key_scale, value_scale = (
            None if store.scale is None else store.scale[layer] for store in self._stores
        )
        heads = (*pages, self.spec.num_heads)
        key, value = (tensor.view(*heads, tensor.shape[-1]) for tensor in rows)
        host_scales = None if host is None else (host[0], host[1])
        return GQACache(key, value, key_scale, value_scale, host_scales)

    def write_plan(self, slots: LogicalSlots, into: WritePlan | None = None) -> WritePlan:
        """Plan of a step's writes; the owner filter and the division happen behind this door.

        slots: one a token, padding tokens in page 0. Build it once a step, use it in every layer.
        into: a plan of this pool to refill and return instead, so that a captured `write` replays
        with new slots; places that `slots` leaves over become padding tokens.
        Raises TypeError for anything but LogicalSlots, ValueError for a slot outside the pool or
        more slots than `into` has places.
        """
        ids = self._checked(slots)
        if into is None:
            return self._mover.plan(ids)
        self._mover.refill(into, ids)
        return into

    def write_plan_parts(self, plan: WritePlan, size: int) -> list[WritePlan]:
        """`plan` as plans of `size` consecutive tokens each, for writes one after the other. They
        share its memory: what refills it refills them.

        Raises ValueError where size does not divide the plan, and in a pool of several ranks.
        """
        return self._mover.parts(plan, size)

    def write(
        self, layer: int, plan: WritePlan, *rows: Tensor, rotation: Rotation | None = None
    ) -> None:
        """Store a step's rows of one layer; rows that this rank does not own are not read.

        rows: key and value [T, Hk, width]; or one latent [T, R + Rr], or latent [T, R] and rope
        key [T, Rr]; converted to the pool's dtype. rotation: applied to the key or rope key.
        Raises ValueError when their number, length or width is not the plan's and the pool's.
        """
        if not isinstance(plan, WritePlan):
            raise TypeError(f"write takes a WritePlan, got {type(plan).__name__}")
        check_rows(self._stores, plan.num_tokens, rows, rotation)
        self._mover.append(layer, plan, rows, rotation)

    def gather(self, slots: LogicalSlots, layers: range, heads: range) -> Tensor:
        """Copy rows out: [len(layers), n, len(heads), row_width], key then value.

        heads: indices into this rank's heads. Every slot must be owned by this rank.
        Raises TypeError for anything but LogicalSlots, ValueError for foreign or bad slots and
        for per_token pools.
        """
        self.spec.check_movable()
        rows = on_device(self._owned_rows(slots).array, self.device)
        self._check_ranges(layers, heads)
        return self._mover.gather(rows, layers, heads)

    def scatter(self, slots: LogicalSlots, layers: range, heads: range, packed: Tensor) -> None:
        """Copy rows in; the reverse of `gather`, with the same errors.

        packed: [len(layers), n, len(heads), row_width] of the pool's dtype.
        """
        self.spec.check_movable()
        rows = on_device(self._owned_rows(slots).array, self.device)
        self._check_ranges(layers, heads)
        shape = (len(layers), len(rows), len(heads), self.spec.row_width)
        if packed.shape != shape or packed.dtype != self.spec.dtype:
            raise ValueError(
                f"packed must be {shape} {self.spec.dtype}, "
                f"got {tuple(packed.shape)} {packed.dtype}"
            )
        self._mover.scatter(rows, layers, heads, packed.to(self.device).contiguous())

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
            store.rows.fill_(float("nan"))
            if store.scale is not None and store.is_per_token:
                store.scale.fill_(float("nan"))

    def count_finite_rows(self, slots: LogicalSlots | None = None) -> int:
        """Rows (layer x slot x head) without NaN or infinity, among `slots` (all owned) or all."""
        stores = [store.rows for store in self._stores]
        if slots is not None:
            rows = on_device(self._owned_rows(slots).array, self.device)
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


def _named_ranges(layers: range, heads: range, spec: KvSpec) -> Iterator[tuple[str, range, int]]:
    yield "layers", layers, spec.num_layers
    yield "heads", heads, spec.num_heads
