"""What a backend promises: attention of one rank over its own keys. No collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from attention.interface import AttentionResult, GQACache, LatentExpansion, MLACache

if TYPE_CHECKING:
    import torch

    from attention.dispatch import AttentionNeeds
    from attention.rows import DecodeRows, ExtendRows


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
