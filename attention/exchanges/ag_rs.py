"""All-gather the LSEs, scale the own outputs, reduce-scatter them over heads in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention.interface import AttentionResult, Group
from attention.merge import merge_weights, weigh

if TYPE_CHECKING:
    from attention.dispatch import AttentionNeeds


class AgRsExchange:
    """Two collectives; twice the bytes of a2a for a 16-bit model, and sums taken on the wire."""

    name = "ag_rs"

    def refusals(self, needs: AttentionNeeds) -> list[str]:
        """None: every dtype, group size and head split is served."""
        return []

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """float32 whatever the model dtype."""
        return torch.float32

    def combine(self, partial: AttentionResult, head_splits: Sequence[int], group: Group) -> Tensor:
        """See Exchange. Head chunks are padded to the largest, ceil(H / c)."""
        out, lse = partial
        weights = merge_weights(group.all_gather(lse.contiguous()))[group.rank]
        pieces = weigh(out.float(), weights).split_with_sizes(list(head_splits), dim=1)
        num_tokens, _, width = out.shape
        if len(set(head_splits)) == 1:
            send = torch.stack(pieces)
        else:
            send = out.new_zeros(
                len(pieces), num_tokens, max(head_splits), width, dtype=torch.float32
            )
            for slot, piece in zip(send, pieces, strict=True):
                slot[:, : piece.shape[1]] = piece
        received = group.reduce_scatter(send)
        return received[:, : head_splits[group.rank]].to(out.dtype)
