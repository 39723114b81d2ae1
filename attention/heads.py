"""Query heads folded onto the KV heads that they read, also where the mapping is uneven."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


class FoldedHeads:
    """H query heads as [Hk, g]: the g query heads of a KV head become rows of one matrix.

    Where KV heads have different numbers of query heads, the missing places are filled with
    copies of another head, which `unfold` drops. Nothing is derived from a ratio of local head
    counts: a shard of 9 query and 3 KV heads may hold 1 + 3 query heads of two KV heads.
    """

    def __init__(self, kv_index: Sequence[int], device: torch.device) -> None:
        """kv_index: for each query head its KV head in the cache, non-decreasing."""
        self.num_q_heads = len(kv_index)
        self.kv_heads = range(kv_index[0], kv_index[-1] + 1) if kv_index else range(0)
        members: list[list[int]] = [[] for _ in self.kv_heads]
        for head, kv_head in enumerate(kv_index):
            members[kv_head - self.kv_heads.start].append(head)
        self.group_size = max((len(heads) for heads in members), default=0)
        self.is_even = all(len(heads) == self.group_size for heads in members)
        self.kv_index = torch.tensor(
            [kv_head - self.kv_heads.start for kv_head in kv_index], dtype=torch.int64
        ).to(device)
        places = [
            (heads + [heads[-1] if heads else 0] * self.group_size)[: self.group_size]
            for heads in members
        ]
        kept = [
            row * self.group_size + place
            for row, heads in enumerate(members)
            for place in range(len(heads))
        ]
        self._head_of_place = torch.tensor(places, dtype=torch.int64).flatten().to(device)
        self._place_of_head = torch.tensor(kept, dtype=torch.int64).to(device)

    def fold(self, q: Tensor) -> Tensor:
        """[B, w, H, D] -> [B, Hk, w * g, D]."""
        if not self.is_even:
            q = q.index_select(2, self._head_of_place)
        batch, window, _, width = q.shape
        if window == 1:
            return q.reshape(batch, len(self.kv_heads), self.group_size, width)
        q = q.reshape(batch, window, len(self.kv_heads), self.group_size, width)
        return q.transpose(1, 2).reshape(batch, len(self.kv_heads), -1, width)

    def unfold(self, folded: Tensor, window: int) -> Tensor:
        """[B, Hk, w * g, ...] -> [B, w, H, ...]."""
        batch, _, _, *rest = folded.shape
        if window > 1:
            folded = folded.reshape(batch, -1, window, self.group_size, *rest).transpose(1, 2)
        heads = folded.reshape(batch, window, -1, *rest)
        return heads if self.is_even else heads.index_select(2, self._place_of_head)


@lru_cache(maxsize=16)
def fold_heads(kv_index: tuple[int, ...], device: torch.device) -> FoldedHeads:
    """The FoldedHeads of this mapping, built once."""
    return FoldedHeads(kv_index, device)
