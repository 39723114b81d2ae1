"""What an exchange promises: partial results of the ranks of a group become each rank's heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from attention.interface import AttentionResult, Group

if TYPE_CHECKING:
    import torch

    from attention.dispatch import AttentionNeeds
    from attention.interface import SplitResult


@dataclass(frozen=True, slots=True)
class ExchangeLimits:
    """What an exchange that owns memory is sized for, the same on every rank of the group."""

    max_tokens: int
    """Most tokens (sequences times window) of a step."""
    dtype: torch.dtype
    """Of the model."""
    device: torch.device


class SymmetricWords(NamedTuple):
    """Memory that every rank of a group can write. own: this rank's, int64 [n], 0 at first.

    addresses: int64 [size] on the device, where this rank's kernels find each rank's words.
    """

    own: Tensor
    addresses: Tensor


@runtime_checkable
class SymmetricGroup(Group, Protocol):
    """A Group whose ranks can map one another's memory."""

    def symmetric_words(self, num_words: int, device: torch.device) -> SymmetricWords:
        """On this rank's GPU. A collective, equal num_words on every rank. The memory lives as long
        as the process."""
        ...


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


@runtime_checkable
class SplitExchange(Exchange, Protocol):
    """An exchange that owns memory and also merges a rank's splits, in the same launch."""

    def allocate(
        self, limits: ExchangeLimits, width: int, head_splits: Sequence[int], group: Group
    ) -> None:
        """Make the memory, once, at start-up; a collective. width: Dv. Raises ValueError for a
        group whose ranks cannot map one another's memory."""
        ...

    def check_tokens(self, num_tokens: int) -> None:
        """Raises ValueError for a step of more tokens than the memory holds."""
        ...

    def combine_splits(
        self, splits: SplitResult, head_splits: Sequence[int], group: Group
    ) -> Tensor:
        """As `combine`, from results whose splits are not merged yet."""
        ...
