"""From a rank's decode kernel to the merged output of its own heads, by way of the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, TypeGuard

from torch import Tensor

from attention.backends.base import DecodeKernel, SplitDecodeKernel
from attention.exchanges.base import Exchange, ExchangeLimits, SplitExchange
from attention.interface import GQACache, Group, MLACache


class Combiner(Protocol):
    """Attends with a kernel and merges over the group. Arguments as DecodeKernel's."""

    def check_tokens(self, num_tokens: int) -> None:
        """Raises ValueError for a step of more tokens than there is memory for."""
        ...

    def gqa(
        self,
        kernel: DecodeKernel,
        q: Tensor,
        cache: GQACache,
        window_key: Tensor | None,
        window_value: Tensor | None,
    ) -> Tensor:
        """[B*w, Hl, D]."""
        ...

    def mla(
        self, kernel: DecodeKernel, q: Tensor, cache: MLACache, window_latent: Tensor | None
    ) -> Tensor:
        """[B*w, Hl, R]."""
        ...


def combiner_for(
    exchange: Exchange,
    group: Group,
    head_splits: Sequence[int],
    *,
    width: int,
    limits: ExchangeLimits | None,
) -> Combiner:
    """The way for this exchange. A collective, for exchanges that own memory.

    width: Dv. Raises ValueError where the exchange needs limits and there are none.
    """
    if group.size == 1 or not sum(head_splits):
        return SingleCombiner()
    if not isinstance(exchange, SplitExchange):
        return ResultCombiner(exchange, group, head_splits)
    if limits is None:
        raise ValueError(f"exchange {exchange.name} owns memory: it must be given its limits")
    exchange.allocate(limits, width, head_splits, group)
    return SplitCombiner(exchange, group, head_splits)


class SingleCombiner:
    """One rank, or no heads: nothing to merge over ranks."""

    def check_tokens(self, num_tokens: int) -> None:
        """Any number."""

    def gqa(
        self,
        kernel: DecodeKernel,
        q: Tensor,
        cache: GQACache,
        window_key: Tensor | None,
        window_value: Tensor | None,
    ) -> Tensor:
        """See Combiner."""
        return kernel.gqa(q, cache, window_key, window_value).out

    def mla(
        self, kernel: DecodeKernel, q: Tensor, cache: MLACache, window_latent: Tensor | None
    ) -> Tensor:
        """See Combiner."""
        return kernel.mla(q, cache, window_latent).out


class ResultCombiner:
    """The kernel merges its splits, the exchange merges over ranks."""

    def __init__(self, exchange: Exchange, group: Group, head_splits: Sequence[int]) -> None:
        self._exchange = exchange
        self._group = group
        self._head_splits = head_splits

    def check_tokens(self, num_tokens: int) -> None:
        """Any number."""

    def gqa(
        self,
        kernel: DecodeKernel,
        q: Tensor,
        cache: GQACache,
        window_key: Tensor | None,
        window_value: Tensor | None,
    ) -> Tensor:
        """See Combiner."""
        partial = kernel.gqa(q, cache, window_key, window_value)
        return self._exchange.combine(partial, self._head_splits, self._group)

    def mla(
        self, kernel: DecodeKernel, q: Tensor, cache: MLACache, window_latent: Tensor | None
    ) -> Tensor:
        """See Combiner."""
        partial = kernel.mla(q, cache, window_latent)
        return self._exchange.combine(partial, self._head_splits, self._group)


class SplitCombiner(ResultCombiner):
    """The exchange merges splits and ranks at once; results of kernels that merge their own splits,
    as vendors' do, go through it too."""

    def __init__(self, exchange: SplitExchange, group: Group, head_splits: Sequence[int]) -> None:
        super().__init__(exchange, group, head_splits)
        self._split_exchange = exchange

    def check_tokens(self, num_tokens: int) -> None:
        """The exchange's own."""
        self._split_exchange.check_tokens(num_tokens)

    def gqa(
        self,
        kernel: DecodeKernel,
        q: Tensor,
        cache: GQACache,
        window_key: Tensor | None,
        window_value: Tensor | None,
    ) -> Tensor:
        """See Combiner."""
        if not _gives_splits(kernel):
            return super().gqa(kernel, q, cache, window_key, window_value)
        splits = kernel.gqa_splits(q, cache, window_key, window_value)
        return self._split_exchange.combine_splits(splits, self._head_splits, self._group)

    def mla(
        self, kernel: DecodeKernel, q: Tensor, cache: MLACache, window_latent: Tensor | None
    ) -> Tensor:
        """See Combiner."""
        if not _gives_splits(kernel):
            return super().mla(kernel, q, cache, window_latent)
        splits = kernel.mla_splits(q, cache, window_latent)
        return self._split_exchange.combine_splits(splits, self._head_splits, self._group)


def _gives_splits(kernel: DecodeKernel) -> TypeGuard[SplitDecodeKernel]:
    return _is_split_class(type(kernel))


@lru_cache
def _is_split_class(kernel_class: type) -> bool:
    # Looking through a protocol's members takes microseconds, and this is asked in every layer.
    return issubclass(kernel_class, SplitDecodeKernel)
