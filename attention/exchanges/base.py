"""What an exchange promises: partial results of the ranks of a group become each rank's heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from attention.interface import AttentionResult, Group

if TYPE_CHECKING:
    import torch

    from attention.dispatch import AttentionNeeds


class Exchange(Protocol):
    """Merges the ranks' partial results over their stripes and scatters the heads."""

    name: str

    def refusals(self, needs: AttentionNeeds) -> list[str]:
        """Every reason why this exchange cannot serve `needs`; empty when it can."""
        ...

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which outputs of model dtype `dtype` travel. LSEs always travel as fp32."""
        ...

    def combine(self, partial: AttentionResult, head_splits: Sequence[int], group: Group) -> Tensor:
        """partial: this rank's out [T, H, Dv] and lse [T, H] for all heads of the group;
        head_splits: heads of each rank, in rank order, summing to H. Returns [T, Hl, Dv] in the
        dtype of `out`, 0 where no rank has keys. A collective, also for ranks without heads."""
        ...
