"""All-gather the LSEs, scale the own outputs, reduce-scatter them over heads in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention.exchanges.pieces import pieces_for
from attention.interface import AttentionResult, Group

if TYPE_CHECKING:
    from attention.dispatch import AttentionNeeds


class AgRsExchange:
    """Two collectives; twice the bytes of a2a for a 16-bit model, and sums taken on the wire.

    On a GPU four launches: all-gather, scale, reduce-scatter, and the cast to the model dtype.
    """

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
        lses = group.all_gather(lse.contiguous())
        send = pieces_for(out.device.type).weigh(out, lses, group.rank, head_splits)
        received = group.reduce_scatter(send)
        return received[:, : head_splits[group.rank]].to(out.dtype)
