"""The oracle: slow, obvious float64 attention over one sequence's keys. For tests only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention.interface import AttentionResult, LatentExpansion


def window_visibility(num_queries: int, num_keys: int, window_mask: str = "causal") -> Tensor:
    """bool [num_queries, num_keys]: which keys each of the last num_queries positions sees.

    "causal": keys up to the query's own position; "full": all of them.
    """
    if window_mask == "full":
        return torch.ones(num_queries, num_keys, dtype=torch.bool)
    query_position = torch.arange(num_keys - num_queries, num_keys)
    return torch.arange(num_keys)[None, :] <= query_position[:, None]


def attend(
    q: Tensor, key: Tensor, value: Tensor, *, scale: float, kv_index: Sequence[int], visible: Tensor
) -> AttentionResult:
    """Attention of q [w, H, D] over key [S, Hk, D] and value [S, Hk, Dv].

    kv_index names the KV head of each query head; visible is bool [w, S].
    Returns float64 out [w, H, Dv] and lse [w, H]; a query that sees nothing gives (0, -inf).
    """
    num_queries, num_heads, _ = q.shape
    out = torch.zeros(num_queries, num_heads, value.shape[-1], dtype=torch.float64)
    lse = torch.full((num_queries, num_heads), float("-inf"), dtype=torch.float64)
    for query in range(num_queries):
        keys = visible[query].nonzero().flatten()
        if len(keys) == 0:
            continue
        for head, kv_head in enumerate(kv_index):
            scores = key[keys, kv_head].double() @ q[query, head].double() * scale
            lse[query, head] = torch.logsumexp(scores, 0)
            weights = torch.exp(scores - lse[query, head])
            out[query, head] = weights @ value[keys, kv_head].double()
    return AttentionResult(out, lse)


def mla_absorbed(
    q_latent: Tensor, q_pe: Tensor, latent: Tensor, *, scale: float, visible: Tensor
) -> AttentionResult:
    """Absorbed MLA: q_latent [w, H, R], q_pe [w, H, Rr], latent [S, R + Rr] -> out [w, H, R]."""
    key = latent[:, None, :]
    value = latent[:, None, : q_latent.shape[-1]]
    return attend(
        torch.cat([q_latent, q_pe], dim=-1),
        key,
        value,
        scale=scale,
        kv_index=[0] * q_latent.shape[1],
        visible=visible,
    )


def mla_expanded(
    q: Tensor, latent: Tensor, expansion: LatentExpansion, *, scale: float, visible: Tensor
) -> AttentionResult:
    """MLA as multi-head attention: q [w, H, dn + dr], latent [S, R + Rr] -> out [w, H, dv]."""
    num_heads = q.shape[1]
    rank = expansion.w_kc.shape[-1]
    compressed, rope_key = latent[:, :rank].double(), latent[:, rank:].double()
    key_nope = torch.einsum("sr,hnr->shn", compressed, expansion.w_kc.double())
    key = torch.cat([key_nope, rope_key[:, None, :].expand(-1, num_heads, -1)], dim=-1)
    value = torch.einsum("sr,hrv->shv", compressed, expansion.w_vc.double())
    return attend(q, key, value, scale=scale, kv_index=range(num_heads), visible=visible)


def merge(partials: Sequence[AttentionResult]) -> AttentionResult:
    """The exact merge: lse = log sum exp(lse_r), out = sum exp(lse_r - lse) out_r, in float64."""
    lse = torch.logsumexp(torch.stack([partial.lse.double() for partial in partials]), dim=0)
    out = torch.zeros_like(partials[0].out, dtype=torch.float64)
    for partial in partials:
        has_keys = partial.lse > float("-inf")
        weight = torch.exp(partial.lse.double() - lse)[..., None]
        out += torch.where(has_keys[..., None], weight * partial.out.double(), 0.0)
    return AttentionResult(out, lse)
