"""An exchange that times itself now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attention.dispatch import AttentionNeeds
from attention.exchanges.base import Exchange, ExchangeLimits, SplitExchange
from attention.interface import AttentionResult, Group, SplitResult

# Once in this many calls: a device must be synchronised to be timed, and that is not free.
_EVERY = 512


def sampled(exchange: Exchange, observe: Callable[[float], object]) -> Exchange:
    """`exchange`, timed now and then; still a SplitExchange if it is one."""
    if isinstance(exchange, SplitExchange):
        return SampledSplitExchange(exchange, observe)
    return SampledExchange(exchange, observe)


class SampledExchange:
    """Forwards to `exchange` and gives the seconds of every 512th call to `observe`."""

    def __init__(self, exchange: Exchange, observe: Callable[[float], object]) -> None:
        self.name = exchange.name
        self._exchange = exchange
        self._observe = observe
        self._num_calls = 0

    def refusals(self, needs: AttentionNeeds) -> list[str]:
        """The exchange's own."""
        return self._exchange.refusals(needs)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The exchange's own."""
        return self._exchange.wire_dtype(dtype)

    def combine(self, partial: AttentionResult, head_splits: Sequence[int], group: Group) -> Tensor:
        """The exchange's own result."""
        return self._timed(partial.out, lambda: self._exchange.combine(partial, head_splits, group))

    def _timed(self, given: Tensor, combine: Callable[[], Tensor]) -> Tensor:
        self._num_calls += 1
        # A captured call runs at every replay, and a stream that captures cannot be waited for.
        if self._num_calls % _EVERY or (given.is_cuda and torch.cuda.is_current_stream_capturing()):
            return combine()
        _finish(given)
        began = time.perf_counter()
        out = combine()
        _finish(out)
        self._observe(time.perf_counter() - began)
        return out


class SampledSplitExchange(SampledExchange):
    """The same for an exchange that merges splits."""

    def __init__(self, exchange: SplitExchange, observe: Callable[[float], object]) -> None:
        super().__init__(exchange, observe)
        self._split_exchange = exchange

    def allocate(
        self, limits: ExchangeLimits, width: int, head_splits: Sequence[int], group: Group
    ) -> None:
        """The exchange's own."""
        self._split_exchange.allocate(limits, width, head_splits, group)

    def check_tokens(self, num_tokens: int) -> None:
        """The exchange's own."""
        self._split_exchange.check_tokens(num_tokens)

    def combine_splits(
        self, splits: SplitResult, head_splits: Sequence[int], group: Group
    ) -> Tensor:
        """The exchange's own result."""
        return self._timed(
            splits.out, lambda: self._split_exchange.combine_splits(splits, head_splits, group)
        )


def _finish(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
