"""Rows of one rank's KV pool: what is stored, how it is written, and who moves it.

Symbols: T tokens of a step, L layers, N pages, P page_size, Hk KV heads of this rank, W row width,
R kv_lora_rank, Rr qk_rope_head_dim. A pool has two stores, keys and values, or one of latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention import accelerator
from attention.layout import StripeLayout

# The largest float8_e4m3fn number; what is above it is stored as it.
FP8_MAX = 448.0
# A row's scale is at least this / FP8_MAX, so that rows of zeros have one.
MIN_AMAX = 2.0**-40


@dataclass(frozen=True, slots=True)
class RowStore:
    """Keys, values or latents of a pool; the true value of an element is stored * scale.

    rows: [L, N * P, Hk, W]. scale: float32, one a layer [L, 1] or one a row [L, N, Hk, P]; None
    where elements are stored as they are.
    """

    rows: Tensor
    scale: Tensor | None = None

    @property
    def is_per_token(self) -> bool:
        """Whether each row has a scale of its own, computed as it is written."""
        return self.scale is not None and self.scale.dim() == 4


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of a step's keys, applied in float32 as they are written.

    positions: int32 or int64 [T], each below max_positions. cos, sin: [max_positions, D/2]; the
    first D numbers of a head are rotated. is_interleaved: pairs are (2j, 2j + 1) as in GPT-J,
    else (j, j + D/2) as in GPT-NeoX; numbers keep their places.
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor
    is_interleaved: bool = False

    @property
    def dim(self) -> int:
        """D, the rotated numbers of a head."""
        return 2 * self.cos.shape[1]


@dataclass(slots=True, eq=False)
class WritePlan:
    """Where a step's tokens go in every layer of one pool. Only that pool's `RowMover` reads it."""

    num_tokens: int


class RowMover(Protocol):
    """Moves rows into and out of one pool. Arguments were checked by the pool, its only caller."""

    def plan(self, slots: NDArray[np.int64]) -> WritePlan:
        """Plan of a step's writes. slots: logical, one a token; the mover filters and divides."""
        ...

    def refill(self, plan: WritePlan, slots: NDArray[np.int64]) -> None:
        """Make `plan` the plan of `slots`, in the same device memory; places that are left over
        get slot 0. Raises ValueError for more slots than the plan has places."""
        ...

    def parts(self, plan: WritePlan, size: int) -> list[WritePlan]:
        """`plan` as plans of `size` consecutive places each, which `refill` of it refills too.
        Raises ValueError where size does not divide it, or the pool is a stripe of several."""
        ...

    def append(
        self, layer: int, plan: WritePlan, rows: Sequence[Tensor], rotation: Rotation | None = None
    ) -> None:
        """Write the rows that this rank owns; others are not read.

        rows: key and value [T, Hk, W]; or one latent [T, R + Rr]; or latent [T, R] and rope key
        [T, Rr]. rotation: of the key or rope key.
        """
        ...

    def gather(self, rows: Tensor, layers: range, heads: range) -> Tensor:
        """[len(layers), n, len(heads), W], key then value. rows: physical, int64 [n]."""
        ...

    def scatter(self, rows: Tensor, layers: range, heads: range, packed: Tensor) -> None:
        """The reverse of `gather`. packed: contiguous, on the pool's device, of its dtype."""
        ...


def row_mover(stores: Sequence[RowStore], stripe: StripeLayout) -> RowMover:
    """The mover of a pool: Triton kernels on GPUs for which they compile, stock torch elsewhere."""
    if stores[0].rows.is_cuda and has_row_kernels(stores[0].rows.dtype):
        from attention.backends.triton_rows import TritonRows

        return TritonRows(stores, stripe)
    from attention.backends.torch_rows import TorchRows

    return TorchRows(stores, stripe)


def has_row_kernels(dtype: torch.dtype) -> bool:
    """Whether Triton kernels write rows of `dtype` on this process's GPU."""
    if not accelerator.has_module("triton"):
        return False
    is_e4m3 = dtype == torch.float8_e4m3fn
    return not is_e4m3 or accelerator.converts_e4m3(accelerator.current_accelerator())


def check_rows(
    stores: Sequence[RowStore],
    num_tokens: int,
    rows: Sequence[Tensor],
    rotation: Rotation | None = None,
) -> None:
    """Raises ValueError unless `rows` and `rotation` fit `RowMover.append` for `num_tokens`."""
    is_latent = len(stores) == 1
    if not (len(rows) == 2 or (is_latent and len(rows) == 1)):
        accepted = "1 or 2 tensors" if is_latent else "2 tensors"
        raise ValueError(f"a pool of {len(stores)} stores takes {accepted}, got {len(rows)}")
    for tensor in rows:
        if len(tensor) != num_tokens:
            raise ValueError(f"plan is for {num_tokens} tokens, got {len(tensor)} rows")
    shapes = [tuple(tensor.shape[1:]) for tensor in rows]
    if is_latent:
        width = stores[0].rows.shape[-1]
        if any(len(shape) != 1 for shape in shapes) or sum(shape[0] for shape in shapes) != width:
            raise ValueError(f"latent rows must have {width} numbers together, got {shapes}")
    else:
        expected = [tuple(store.rows.shape[2:]) for store in stores]
        if shapes != expected:
            raise ValueError(f"key and value rows must be {expected}, got {shapes}")
    if rotation is not None:
        _check_rotation(rotation, num_tokens, rows, is_latent=is_latent)


def _check_rotation(
    rotation: Rotation, num_tokens: int, rows: Sequence[Tensor], *, is_latent: bool
) -> None:
    if is_latent and len(rows) == 1:
        raise ValueError("to be rotated, the rope key must be given apart from the latent")
    if rotation.positions.shape != (num_tokens,) or rotation.cos.shape != rotation.sin.shape:
        raise ValueError(
            f"rotation needs {num_tokens} positions and equal tables, got "
            f"{tuple(rotation.positions.shape)}, {tuple(rotation.cos.shape)} and "
            f"{tuple(rotation.sin.shape)}"
        )
    width = key_of(rows, is_latent=is_latent).shape[-1]
    if rotation.dim > width:
        raise ValueError(f"rotation of {rotation.dim} numbers is wider than a key of {width}")


def key_of(rows: Sequence[Tensor], *, is_latent: bool) -> Tensor:
    """The rows that a rotation turns: the keys, or the rope keys given after the latents."""
    return rows[1] if is_latent else rows[0]


def part_spans(plan: WritePlan, size: int, stripe: StripeLayout) -> list[slice]:
    """Places of each of `RowMover.parts`, with its errors."""
    if size < 1 or plan.num_tokens % size:
        raise ValueError(f"parts of {size} do not divide a plan of {plan.num_tokens} tokens")
    if stripe.dcp_size > 1:
        raise ValueError(f"a plan has parts on one rank only, not on {stripe.dcp_size}")
    return [slice(start, start + size) for start in range(0, plan.num_tokens, size)]


def padded_slots(slots: NDArray[np.int64], num_tokens: int) -> NDArray[np.int64]:
    """int64 [num_tokens]: `slots`, then slot 0, which is in the sink page."""
    if len(slots) > num_tokens:
        raise ValueError(f"plan has places for {num_tokens} tokens, got {len(slots)}")
    padded = np.zeros(num_tokens, dtype=np.int64)
    padded[: len(slots)] = slots
    return padded


def on_device(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """A copy of `array` that may be written in and out of inference mode. The host does not wait
    for the stream: what is read of it comes after, and the source is staged before this returns."""
    with torch.inference_mode(False):
        return torch.tensor(array).to(device, non_blocking=True)
