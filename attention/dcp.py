"""Decode-context-parallel attention of one rank: plans once a step, attends once a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.backends.base import (
    AttentionBackend,
    CapturableBackend,
    DecodeCall,
    DecodeKernel,
    ExtendKernel,
)
from attention.decode_buffers import DecodeBuffers, decode_bounds
from attention.exchanges.base import Exchange, ExchangeLimits
from attention.exchanges.combiner import combiner_for
from attention.exchanges.query import gather_query_heads
from attention.interface import (
    DecodeBatch,
    ExtendBatch,
    GQACache,
    GQAGeometry,
    Group,
    LatentExpansion,
    MLACache,
    MLAGeometry,
)
from attention.layout import HeadLayout, StripeLayout
from attention.prefix import PrefixRows
from attention.rows import decode_rows, extend_rows
from attention.stored_rows import StoredPool

Q_MODES = ("gather", "replicate")


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """A planned decode or verify step. Valid until the next plan_decode of the same object, or into
    the same buffers."""

    kernel: DecodeKernel
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    """A planned extend step."""

    kernel: ExtendKernel
    prefix: PrefixRows
    num_tokens: int


class DcpAttention:
    """Exact attention over a KV cache that is striped over the ranks of a DCP group.

    Every rank of the group makes the same calls in the same order, also a rank without heads. The
    caller has written the step's KV rows into the pool first. With c = 1 there are no collectives.
    """

    def __init__(
        self,
        *,
        geometry: GQAGeometry | MLAGeometry,
        stripe: StripeLayout,
        heads: HeadLayout,
        group: Group,
        backend: AttentionBackend,
        exchange: Exchange,
        q_mode: str,
        limits: ExchangeLimits | None = None,
    ) -> None:
        """q_mode: "gather" (q of the rank's own heads is passed and all-gathered) or "replicate"
        (q of all heads of the group is passed). limits: what exchanges that own memory (a
        SplitExchange) are sized for; the others need none. A collective with such an exchange.

        Raises ValueError where the layouts and the group disagree, or limits are missing."""
        _check_ranks(stripe, heads, group)
        if q_mode not in Q_MODES:
            raise ValueError(f"q_mode {q_mode!r} must be one of {Q_MODES}")
        self._geometry = geometry
        self._stripe = stripe
        self._heads = heads
        self._group = group
        self._backend = backend
        self._gathers_q = q_mode == "gather" and group.size > 1
        self._head_splits = heads.group_head_splits
        self._num_q_heads_given = (
            len(heads.local_q_heads) if q_mode == "gather" else len(heads.group_q_heads)
        )
        self._combiner = combiner_for(
            exchange, group, self._head_splits, width=self._value_width, limits=limits
        )

    def decode_buffers(
        self,
        *,
        batch_size: int,
        max_len: int,
        window: int,
        window_mask: str,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device | str,
        max_growth: int = 0,
    ) -> DecodeBuffers:
        """Reserve buffers for plans of decode (window 1) or verify steps, see DecodeBuffers.

        batch_size: sequences of each step, padding included. max_len: most tokens of a sequence
        before the step's window. dtype: of q; kv_dtype: of the pool. max_growth: how often a plan
        may `grow`, on one rank only. Reserve the largest first: workspaces are then shared. Raises
        ValueError for impossible sizes, NotImplementedError where the backend cannot be captured.
        """
        bounds = decode_bounds(
            self._stripe,
            batch_size=batch_size,
            max_len=max_len,
            window=window,
            window_mask=window_mask,
            max_growth=max_growth,
        )
        if not isinstance(self._backend, CapturableBackend):
            raise NotImplementedError(
                f"backend {self._backend.name} plans each step anew: its decode cannot be captured "
                f"in a CUDA graph"
            )
        call = DecodeCall(
            is_mla=isinstance(self._geometry, MLAGeometry),
            kv_index=self._kv_index,
            scale=self._geometry.softmax_scale,
            value_width=self._value_width,
            key_width=self._key_width,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )
        reserved = self._backend.reserve_decode(bounds, call, torch.device(device))
        return DecodeBuffers(
            batch_size, max_len, window, window_mask, self._stripe, reserved, max_growth
        )

    def plan_decode(
        self,
        batch: DecodeBatch,
        device: torch.device | str,
        into: DecodeBuffers | None = None,
    ) -> DecodePlan:
        """Plan a decode (window 1) or verify (window > 1) step; call once a step, not a layer.

        into: buffers of decode_buffers whose plan is replaced; the plan returned is the same for
        capture and replay. Raises ValueError for a batch that is outside their bounds.
        """
        num_tokens = len(batch.seq_lens) * batch.window
        self._combiner.check_tokens(num_tokens)
        if into is not None:
            into.check(batch, self._stripe)
            return DecodePlan(into.reserved.fill(decode_rows(batch, self._stripe)), num_tokens)
        kernel = self._backend.plan_decode(
            decode_rows(batch, self._stripe),
            kv_index=self._kv_index,
            scale=self._geometry.softmax_scale,
            value_width=self._value_width,
            device=torch.device(device),
        )
        return DecodePlan(kernel, num_tokens)

    def plan_extend(self, batch: ExtendBatch, device: torch.device | str) -> ExtendPlan:
        """Plan a step of chunks; call once a step, not a layer."""
        rows = extend_rows(batch, self._stripe)
        local = self._heads.local_heads_in_group
        kernel = self._backend.plan_extend(
            rows,
            kv_index=self._heads.kv_index_of_group_q_head[local.start : local.stop],
            scale=self._geometry.softmax_scale,
            device=torch.device(device),
        )
        prefix = PrefixRows(batch, self._stripe, self._group, torch.device(device))
        return ExtendPlan(kernel, prefix, num_tokens=sum(rows.chunk_lens))

    def gqa_decode(
        self,
        q: Tensor,
        cache: GQACache,
        window_key: Tensor | None,
        window_value: Tensor | None,
        plan: DecodePlan,
    ) -> Tensor:
        """Attention of the step's B*w queries over everything committed and the window.

        q: [B*w, Hq, D], Hq the rank's own heads or, if q is replicated, the group's. cache: this
        rank's pool of the layer. window_key, window_value: [B*w, Hk, D], read only if w > 1, the
        same on every rank. Returns [B*w, Hl, D] in the dtype of q; 0 for padding sequences.
        """
        self._check_q(q, plan.num_tokens)
        if not self._heads.group_q_heads:
            return q
        self._check_pool_heads(cache)
        return self._combiner.gqa(plan.kernel, self._widen(q), cache, window_key, window_value)

    def mla_decode(
        self,
        q_latent: Tensor,
        q_pe: Tensor,
        cache: MLACache,
        window_latent: Tensor | None,
        plan: DecodePlan,
    ) -> Tensor:
        """Absorbed multi-head latent attention, otherwise as `gqa_decode`.

        q_latent: [B*w, Hq, R], q_pe: [B*w, Hq, Rr], window_latent: [B*w, R + Rr].
        Returns [B*w, Hl, R].
        """
        self._check_q(q_latent, plan.num_tokens)
        if not self._heads.group_q_heads:
            return q_latent
        q = self._widen(torch.cat([q_latent, q_pe], dim=-1))
        return self._combiner.mla(plan.kernel, q, cache, window_latent)

    def gqa_extend(
        self, q: Tensor, key: Tensor, value: Tensor, cache: GQACache, plan: ExtendPlan
    ) -> Tensor:
        """Causal attention of the rank's own heads over [prefix | chunk] of each sequence.

        q: [T, Hl, D]; key, value: [T, Hk, D] of the chunks, Hk the group's. The prefix is read
        from the stripes of all ranks. Returns [T, Hl, D].
        """
        prefix_key = prefix_value = None
        if not plan.prefix.is_empty and self._heads.group_q_heads:
            self._check_pool_heads(cache)
            prefix_key, prefix_value = plan.prefix.gather(
                StoredPool.of(cache.key, cache.key_scale),
                StoredPool.of(cache.value, cache.value_scale),
                dtype=q.dtype,
            )
        return plan.kernel.gqa(q, key, value, prefix_key, prefix_value)

    def mla_extend(
        self,
        q: Tensor,
        latent: Tensor,
        cache: MLACache,
        expansion: LatentExpansion,
        plan: ExtendPlan,
    ) -> Tensor:
        """Latent attention expanded to multi-head attention, otherwise as `gqa_extend`.

        q: [T, Hl, dn + dr], nope part first; latent: [T, R + Rr] of the chunks; expansion: of the
        rank's own heads or of the group's, of which the own are used. Returns [T, Hl, dv].
        """
        prefix = None
        if not plan.prefix.is_empty:
            (prefix,) = plan.prefix.gather(StoredPool.of(cache.latent, cache.scale), dtype=q.dtype)
        return plan.kernel.mla(q, latent, prefix, self._local_expansion(expansion))

    def own_heads(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's own heads out of a tensor with its own or the group's heads along `dim`."""
        local = self._heads.local_heads_in_group
        if tensor.shape[dim] == len(local):
            return tensor
        return tensor.narrow(dim, local.start, len(local))

    @property
    def _kv_index(self) -> tuple[int, ...]:
        """KV head in the pool of each query head of the group."""
        if isinstance(self._geometry, MLAGeometry):
            return (0,) * len(self._heads.group_q_heads)
        return self._heads.kv_index_of_group_q_head

    @property
    def _key_width(self) -> int:
        if isinstance(self._geometry, MLAGeometry):
            return self._geometry.kv_lora_rank + self._geometry.qk_rope_head_dim
        return self._geometry.head_dim

    @property
    def _value_width(self) -> int:
        if isinstance(self._geometry, MLAGeometry):
            return self._geometry.kv_lora_rank
        return self._geometry.head_dim

    def _widen(self, q: Tensor) -> Tensor:
        return gather_query_heads(q, self._head_splits, self._group) if self._gathers_q else q

    def _local_expansion(self, expansion: LatentExpansion) -> LatentExpansion:
        local = self._heads.local_heads_in_group
        given = expansion.w_kc.shape[0]
        if given == len(local):
            return expansion
        if given != len(self._heads.group_q_heads):
            raise ValueError(
                f"expansion has {given} heads; expected the rank's {len(local)} "
                f"or the group's {len(self._heads.group_q_heads)}"
            )
        own = slice(local.start, local.stop)
        return LatentExpansion(expansion.w_kc[own], expansion.w_vc[own])

    def _check_q(self, q: Tensor, num_tokens: int) -> None:
        if q.shape[0] != num_tokens or q.shape[1] != self._num_q_heads_given:
            raise ValueError(
                f"q has {q.shape[0]} tokens of {q.shape[1]} heads; the plan has {num_tokens} "
                f"tokens, this rank passes {self._num_q_heads_given} heads"
            )

    def _check_pool_heads(self, cache: GQACache) -> None:
        expected = len(self._heads.group_kv_heads)
        if cache.key.shape[2] != expected:
            raise ValueError(
                f"the pool keeps {cache.key.shape[2]} KV heads; the group's query heads read "
                f"{expected}"
            )


def _check_ranks(stripe: StripeLayout, heads: HeadLayout, group: Group) -> None:
    sizes = {stripe.dcp_size, heads.dcp_size, group.size}
    ranks = {stripe.dcp_rank, heads.dcp_rank, group.rank}
    if len(sizes) > 1 or len(ranks) > 1:
        raise ValueError(
            f"stripe (rank {stripe.dcp_rank} of {stripe.dcp_size}), heads (rank {heads.dcp_rank} "
            f"of {heads.dcp_size}) and group (rank {group.rank} of {group.size}) must agree"
        )
