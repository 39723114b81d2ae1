"""Absorbed MLA over a paged prefix by a kernel that takes one query a sequence and few heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attention.interface import AttentionResult, GQACache, MLACache

# (q [n, heads, R + Rr] contiguous, cache) -> out [n, heads, R], natural-log lse [n, heads].
LatentLaunch = Callable[[Tensor, MLACache], AttentionResult]


class LatentPrefix:
    """A PrefixKernel over a vendor's decode kernel.

    All heads of MLA read the same latent and no query of a window is masked over the prefix, so a
    window's w queries are w times as many heads of one query: the prefix is read once, and the
    causal masks that vendors apply to longer queries by local index never come into play.
    """

    def __init__(self, launch: LatentLaunch, head_chunks: Callable[[int], Sequence[int]]) -> None:
        """head_chunks: number of heads -> the sizes in which the kernel takes them."""
        self._launch = launch
        self._head_chunks = head_chunks

    def attend(self, q: Tensor, cache: GQACache | MLACache) -> AttentionResult:
        """See PrefixKernel. Raises TypeError for a GQA cache."""
        if not isinstance(cache, MLACache):
            raise TypeError("this backend serves MLA only")
        num_sequences, window, num_heads, width = q.shape
        rows = q.reshape(num_sequences, window * num_heads, width)
        pieces = rows.split_with_sizes(list(self._head_chunks(rows.shape[1])), dim=1)
        parts = [self._launch(piece.contiguous(), cache) for piece in pieces]
        out = parts[0].out if len(parts) == 1 else torch.cat([part.out for part in parts], dim=1)
        lse = parts[0].lse if len(parts) == 1 else torch.cat([part.lse for part in parts], dim=1)
        shape = (num_sequences, window, num_heads)
        return AttentionResult(out.view(*shape, -1), lse.view(shape))


def chunks_up_to(limit: int) -> Callable[[int], list[int]]:
    """As few chunks of at most `limit` heads as possible, as even as possible."""

    def chunks(num_heads: int) -> list[int]:
        count = -(-num_heads // limit)
        return [
            (part + 1) * num_heads // count - part * num_heads // count for part in range(count)
        ]

    return chunks
