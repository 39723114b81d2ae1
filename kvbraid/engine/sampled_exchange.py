"""An exchange that times itself now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attention.dispatch import AttentionNeeds
from attention.exchanges.base import Exchange
from attention.interface import AttentionResult, Group

# Once in this many calls: a device must be synchronised to be timed, and that is not free.
_EVERY = 512


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
        self._num_calls += 1
        if self._num_calls % _EVERY:
            return self._exchange.combine(partial, head_splits, group)
        _finish(partial.out)
        began = time.perf_counter()
        out = self._exchange.combine(partial, head_splits, group)
        _finish(out)
        self._observe(time.perf_counter() - began)
        return out


def _finish(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
