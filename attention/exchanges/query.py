"""Widening a rank's queries to all heads of its group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention.interface import Group


def gather_query_heads(q: Tensor, head_splits: Sequence[int], group: Group) -> Tensor:
    """All-gather q [T, Hl, D] over heads, in rank order -> [T, H, D].

    head_splits: heads of each rank, in rank order. Uneven pieces travel padded to the largest. A
    collective, also for ranks without heads.
    """
    most = max(head_splits)
    if q.shape[1] < most:
        padded = q.new_zeros(q.shape[0], most, q.shape[2])
        padded[:, : q.shape[1]] = q
        q = padded
    gathered = group.all_gather(q.contiguous())
    return torch.cat(
        [piece[:, :heads] for piece, heads in zip(gathered, head_splits, strict=True)], dim=1
    )
