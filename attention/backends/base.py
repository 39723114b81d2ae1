"""What a backend promises: attention of one rank over its own keys. No collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from attention.interface import (
    AttentionResult,
    GQACache,
    LatentExpansion,
    MLACache,
    SplitResult,
)

if TYPE_CHECKING:
    import torch

    from attention.dispatch import AttentionNeeds
    from attention.rows import DecodeBounds, DecodeRows, ExtendRows


class DecodeKernel(Protocol):
    """Decode or verify attention, planned for one step and called once a layer.

    Returns out in the dtype of q, normalised over this rank's keys, and natural-log lse; whatever
    base the kernel uses inside is converted here. (0, -inf) where this rank has no keys is written
    by the backend, not trusted from a kernel.
    """

    def gqa(
        self, q: Tensor, cache: GQACache, window_key: Tensor | None, window_value: Tensor | None
    ) -> AttentionResult:
        """q [B*w, H, D], window_key and window_value [B*w, Hk, D] -> [B*w, H, D], [B*w, H]."""
        ...

    def mla(self, q: Tensor, cache: MLACache, window_latent: Tensor | None) -> AttentionResult:
        """q [B*w, H, R + Rr], window_latent [B*w, R + Rr] -> [B*w, H, R], [B*w, H]."""
        ...


@runtime_checkable
class SplitDecodeKernel(DecodeKernel, Protocol):
    """A DecodeKernel that can stop before it merges the splits of a sequence, for an exchange that
    merges them itself. `gqa` and `mla` are these and the merge."""

    def gqa_splits(
        self, q: Tensor, cache: GQACache, window_key: Tensor | None, window_value: Tensor | None
    ) -> SplitResult:
        """See DecodeKernel.gqa."""
        ...

    def mla_splits(self, q: Tensor, cache: MLACache, window_latent: Tensor | None) -> SplitResult:
        """See DecodeKernel.mla."""
        ...


class ExtendKernel(Protocol):
    """Causal attention of this rank's heads over [prefix | chunk], planned for one step.

    prefix_* hold all sequences' prefixes in position order, concatenated; None when all are empty.
    """

    def gqa(
        self,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        prefix_key: Tensor | None,
        prefix_value: Tensor | None,
    ) -> Tensor:
        """q [T, Hl, D], key and value [T, Hk, D], prefix_* [S, Hk, D] -> [T, Hl, D]."""
        ...

    def mla(
        self, q: Tensor, latent: Tensor, prefix: Tensor | None, expansion: LatentExpansion
    ) -> Tensor:
        """q [T, Hl, dn + dr], latent [T, R + Rr], prefix [S, R + Rr] -> [T, Hl, dv]."""
        ...


class AttentionBackend(Protocol):
    """A family of kernels. One instance belongs to one rank and one thread: it owns scratch."""

    name: str

    def refusals(self, needs: AttentionNeeds) -> list[str]:
        """Every reason why this backend cannot serve `needs`; empty when it can."""
        ...

    def plan_decode(
        self,
        rows: DecodeRows,
        *,
        kv_index: tuple[int, ...],
        scale: float,
        value_width: int,
        device: torch.device,
    ) -> DecodeKernel:
        """Plan a step. kv_index: KV head in the cache of each query head of the DCP group (all 0
        for MLA); value_width: leading columns of a row that are its value in MLA. Call once a
        step: the plan before it is no longer valid."""
        ...

    def plan_extend(
        self,
        rows: ExtendRows,
        *,
        kv_index: tuple[int, ...],
        scale: float,
        device: torch.device,
    ) -> ExtendKernel:
        """Plan a step's extend. kv_index: KV head in the cache of each query head of this rank."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCall:
    """What every call of a decode kernel has in common.

    kv_index, scale, value_width: as in AttentionBackend.plan_decode. key_width: columns of a key.
    dtype: of q. kv_dtype: of the pool, whose rows must have no gaps.
    """

    is_mla: bool
    kv_index: tuple[int, ...]
    scale: float
    value_width: int
    key_width: int
    dtype: torch.dtype
    kv_dtype: torch.dtype


class ReservedDecode(Protocol):
    """Buffers of a backend for the plans of all decode steps within static bounds.

    Launches of the kernel depend on nothing but the bounds and the buffers: grid, strides and
    addresses are fixed, so that a captured graph computes the step that was filled in last.
    """

    def fill(self, rows: DecodeRows) -> DecodeKernel:
        """Plan a step, which must be within the bounds, into the buffers. The copy is ordered on
        the current stream."""
        ...

    def grow(self) -> None:
        """See DecodeBuffers.grow."""
        ...


@runtime_checkable
class CapturableBackend(AttentionBackend, Protocol):
    """A backend whose decode can be captured in a CUDA graph and replayed for other lengths."""

    def reserve_decode(
        self,
        bounds: DecodeBounds,
        call: DecodeCall,
        device: torch.device,
    ) -> ReservedDecode:
        """Reserve buffers for plans of decode steps."""
        ...
