"""One all-to-all of outputs and LSE bits packed together; each rank merges its own heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention.interface import AttentionResult, Group
from attention.merge import merge_outputs

if TYPE_CHECKING:
    from attention.dispatch import AttentionNeeds

_LSE_BYTES = 4


class A2AExchange:
    """Sends T * (H - Hl) rows of Dv values in the model dtype and one float32 LSE each."""

    name = "a2a"

    def refusals(self, needs: AttentionNeeds) -> list[str]:
        """The LSE bits must fill whole columns of the model dtype."""
        if needs.dtype.itemsize > _LSE_BYTES:
            return [f"dtype {needs.dtype} is wider than the {_LSE_BYTES} bytes of a packed LSE"]
        return []

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The model dtype."""
        return dtype

    def combine(self, partial: AttentionResult, head_splits: Sequence[int], group: Group) -> Tensor:
        """See Exchange."""
        out, lse = partial
        num_tokens, _, width = out.shape
        num_local = head_splits[group.rank]
        received = group.all_to_all(
            _pack(out, lse, head_splits).view(torch.uint8),
            [num_tokens * heads for heads in head_splits],
            [num_tokens * num_local] * group.size,
        )
        columns = width + _LSE_BYTES // out.dtype.itemsize
        packed = received.view(out.dtype).view(group.size, num_tokens, num_local, columns)
        received_lse = packed[..., width:].contiguous().view(torch.float32).squeeze(-1)
        return merge_outputs(packed[..., :width], received_lse)


def _pack(out: Tensor, lse: Tensor, head_splits: Sequence[int]) -> Tensor:
    """[T * H, Dv + LSE columns]: rows grouped by the rank that keeps their head."""
    lse_bits = lse.contiguous()[..., None].view(out.dtype)
    packed = torch.cat([out, lse_bits], dim=-1)
    if packed.shape[0] == 1:
        return packed[0]
    pieces = packed.split_with_sizes(list(head_splits), dim=1)
    return torch.cat([piece.flatten(0, 1) for piece in pieces])
