"""What the attention library promises: types and protocols. Tensors in, tensors out.

Symbols: T tokens of a step, B sequences, w window width (queries a sequence), H query heads of a
DCP group, Hl query heads of one rank, Hk KV heads of the group, D head_dim, Dv value width,
R kv_lora_rank, Rr qk_rope_head_dim, P page_size, N physical pages, c dcp_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


class AttentionResult(NamedTuple):
    """Attention over the keys that the caller named.

    out: [T, H, Dv] in the model dtype, normalised over those keys; 0 where there are none.
    lse: [T, H] float32 natural-log sum of exponentials; -inf where there are no keys.
    """

    out: Tensor
    lse: Tensor


class SplitResult(NamedTuple):
    """Attention over the keys that the caller named, before the splits of a sequence are merged.

    out, lse: as in AttentionResult, but complete only for sequences without slots; what they hold
        for the others is undefined.
    part_out: [slots, w * H, Dv] float32 or, where they would be much to write, the dtype of q;
        part_lse: [slots, w * H] float32, natural log: results over parts of a sequence's keys. A
        slot always has keys.
    slot_starts: int32 [B + 1] on the device: slots [slot_starts[b], slot_starts[b + 1]) are those
        of sequence b; there are none where out and lse are complete, also without any keys.
    max_slots: no sequence has more; 0 means that nothing is left to merge.

    The parts are scratch: valid until the next call of a kernel of the same backend.
    """

    out: Tensor
    lse: Tensor
    part_out: Tensor
    part_lse: Tensor
    slot_starts: Tensor
    max_slots: int


class Group(Protocol):
    """Collectives among the ranks of one group. Every rank calls the same ones in the same order.

    Tensors are contiguous and equal in shape and dtype on every rank unless said otherwise.
    """

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        ...

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[size, *tensor.shape], entry r from rank r."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, written into `tensor` and returned. Bitwise equal on every rank."""
        ...

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """`tensor` is [size, ...]; returns the sum over ranks of entry `rank`."""
        ...

    def all_to_all(self, tensor: Tensor, send_splits: list[int], recv_splits: list[int]) -> Tensor:
        """Dim 0 of `tensor` is cut by send_splits, piece r goes to rank r; returns the pieces
        received, concatenated in rank order (dim 0 = sum(recv_splits))."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """`tensor` of rank `source`, written into every rank's `tensor` and returned."""
        ...

    def barrier(self) -> None:
        """Returns once every rank has entered."""
        ...


class GQACache(NamedTuple):
    """One layer's KV on this rank. key and value: [N, P, Hk, D].

    key_scale, value_scale: float32, both or neither, for keys and values in float8_e4m3fn: [1], or
    one a token and head [N, Hk, P], contiguous: a head's scales of a page lie together, as one head
    reads them. True value = stored * scale.
    host_scales: the scales [1] of keys and values once more, as numbers, for kernels that take them
    as arguments: whoever sets a scale knows it, while to read it would wait for the device in each
    layer, and cannot be captured in a graph.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    host_scales: tuple[float, float] | None = None


class MLACache(NamedTuple):
    """One layer's latent KV on this rank. latent: [N, P, R + Rr] (latent first, then rope key).

    scale: float32, for latents in float8_e4m3fn: [1], or one a token [N, P]. True value =
    stored * scale. host_scale: the scale [1] as a number, see GQACache.
    """

    latent: Tensor
    scale: Tensor | None = None
    host_scale: float | None = None


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Sequences that each add `window` tokens this step (1 = plain decode).

    seq_lens: int32 CPU [B], global lengths INCLUDING the window; 0 marks a padding row.
    page_table: int32 [B, max_pages], physical page of each logical page; entries past a
    sequence's pages are never read.
    """

    seq_lens: Tensor
    page_table: Tensor
    window: int = 1
    window_mask: str = "causal"  # or "full"


@dataclass(frozen=True, slots=True)
class ExtendBatch:
    """Sequences that each add a chunk this step, chunks concatenated in this order.

    prefix_lens, chunk_lens: tokens before the chunk (already in the pool) and in it.
    page_table: int32 [E, max_pages], as in DecodeBatch.
    """

    prefix_lens: list[int]
    chunk_lens: list[int]
    page_table: Tensor


@dataclass(frozen=True, slots=True)
class GQAGeometry:
    """Shape of grouped-query attention (MHA and MQA included)."""

    head_dim: int
    softmax_scale: float


@dataclass(frozen=True, slots=True)
class MLAGeometry:
    """Shape of multi-head latent attention."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float


class LatentExpansion(NamedTuple):
    """This rank's up-projections out of the latent, for its Hl heads (or the group's H heads
    when q is replicated, of which only the local ones are used in extend).

    w_kc: [heads, qk_nope_head_dim, R]   k_nope = latent @ w_kc^T;   q_latent = q_nope @ w_kc
    w_vc: [heads, R, v_head_dim]         v = latent @ w_vc
    """

    w_kc: Tensor
    w_vc: Tensor


__all__ = [
    "AttentionResult",
    "DecodeBatch",
    "ExtendBatch",
    "GQACache",
    "GQAGeometry",
    "Group",
    "LatentExpansion",
    "MLACache",
    "MLAGeometry",
    "SplitResult",
]
