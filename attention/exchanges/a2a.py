"""One all-to-all of outputs and LSE bits packed together; each rank merges its own heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention.exchanges.pieces import LSE_BYTES, piece_bytes, pieces_for
from attention.interface import AttentionResult, Group

if TYPE_CHECKING:
    from attention.dispatch import AttentionNeeds


class A2AExchange:
    """Sends T * (H - Hl) rows of Dv values in the model dtype and one float32 LSE each.

    On a GPU three launches: pack, the collective, merge.
    """

    name = "a2a"

    def refusals(self, needs: AttentionNeeds) -> list[str]:
        """A row must fill whole words of an LSE's size."""
        if needs.dtype.itemsize > LSE_BYTES:
            return [f"dtype {needs.dtype} is wider than the {LSE_BYTES} bytes of a packed LSE"]
        return []

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The model dtype."""
        return dtype

    def combine(self, partial: AttentionResult, head_splits: Sequence[int], group: Group) -> Tensor:
        """See Exchange."""
        out = partial.out
        num_tokens, _, width = out.shape
        sizes = [piece_bytes(num_tokens * heads, width, out.dtype) for heads in head_splits]
        own_size = sizes[group.rank]
        pieces = pieces_for(out.device.type)
        received = group.all_to_all(
            pieces.pack(partial, head_splits), sizes, [own_size] * group.size
        )
        return pieces.merge(received.view(group.size, own_size), out, head_splits[group.rank])
