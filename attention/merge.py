"""The exact merge of partial attention results by their natural-log LSE."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.interface import AttentionResult

# Elements of the partials that are widened to float32 at once. It bounds the merge's temporaries
# to a few MiB however large the partials are.
_CHUNK_ELEMENTS = 1 << 18

_NO_KEYS = float("-inf")


def merge_weights(lse: Tensor) -> Tensor:
    """Share of each partial in the merged result: exp(lse_r - logsumexp_r lse_r).

    lse: float32 [c, ...] natural log. Returns float32 of the same shape; 0 for a partial without
    keys, also where no partial has any. A NaN or +inf lse is damage, not emptiness: it gives NaN,
    so that a broken stripe cannot be mistaken for an empty one.
    """
    return torch.softmax(lse, dim=0).masked_fill_(lse == _NO_KEYS, 0.0)


def weigh(out: Tensor, weights: Tensor) -> Tensor:
    """out [..., Dv] times weights [...] as float32; exactly 0 where the weight is 0.

    The guard matters because `out` may hold NaN where its weight is 0, and NaN * 0 is NaN.
    """
    return (out * weights[..., None]).masked_fill_((weights == 0)[..., None], 0.0)


def merge(out: Tensor, lse: Tensor) -> AttentionResult:
    """Merge c partial results over disjoint keys.

    out: [c, T, H, Dv]; lse: float32 [c, T, H], natural log. Returns out [T, H, Dv] in the dtype
    of `out` and float32 lse [T, H]; (0, -inf) where no partial has keys. The inputs are not
    changed, and beside them and the output at most a few MiB are used.
    """
    return AttentionResult(merge_outputs(out, lse), torch.logsumexp(lse, dim=0))


def merge_outputs(out: Tensor, lse: Tensor) -> Tensor:
    """`merge` without the merged lse: [T, H, Dv]."""
    num_partials, num_tokens, num_heads, width = out.shape
    weights = merge_weights(lse)
    tokens_per_chunk = max(1, _CHUNK_ELEMENTS // max(1, num_partials * num_heads * width))
    if tokens_per_chunk >= num_tokens:
        return weigh(out, weights).sum(dim=0).to(out.dtype)
    merged = out.new_empty(num_tokens, num_heads, width)
    for start in range(0, num_tokens, tokens_per_chunk):
        chunk = slice(start, start + tokens_per_chunk)
        merged[chunk] = weigh(out[:, chunk], weights[:, chunk]).sum(dim=0)
    return merged
