"""Attention over the committed prefixes by FlashInfer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention.backends.flashinfer_wrappers import FlashInferWrappers
from attention.backends.lse_base import LseBase
from attention.backends.per_tensor_scale import head_scales
from attention.backends.vendor_backend import PrefixPlan
from attention.heads import fold_heads
from attention.interface import AttentionResult, GQACache, MLACache


class FlashInferPrefix:
    """A PrefixKernel. Plans at the first layer's call, when the dtypes are known, once a step.

    FlashInfer's own causal mask is never used: it masks by local position, which is wrong on a
    stripe. Over the prefix alone there is nothing to mask.
    """

    def __init__(self, plan: PrefixPlan, *, wrappers: FlashInferWrappers) -> None:
        self._live = plan.live
        self._wrappers = wrappers
        self._heads = fold_heads(plan.kv_index, plan.device)
        self._scale = plan.scale
        self._value_width = plan.value_width
        self._planned: Any = None

    def attend(self, q: Tensor, cache: GQACache | MLACache) -> AttentionResult:
        """See PrefixKernel."""
        if isinstance(cache, MLACache):
            return self._attend_latent(q, cache.latent)
        return self._attend_heads(q, cache)

    def _attend_latent(self, q: Tensor, pool: Tensor) -> AttentionResult:
        num_sequences, window, num_heads, width = q.shape
        rank = self._value_width
        if self._planned is None:
            self._planned = self._plan_latent(q, pool)
        queries = q.reshape(num_sequences * window, num_heads, width)
        out, lse = self._planned.run(
            queries[..., :rank],
            queries[..., rank:],
            pool[..., :rank],
            pool[..., rank:],
            return_lse=True,
        )
        shape = (num_sequences, window, num_heads)
        return AttentionResult(out.view(*shape, rank), LseBase.TWO.to_natural(lse).view(shape))

    def _plan_latent(self, q: Tensor, pool: Tensor) -> Any:
        live, rank = self._live, self._value_width
        wrapper = self._wrappers.latent
        wrapper.plan(
            _starts(len(q), q.shape[1]),
            live.page_starts(),
            live.page_indices(),
            live.lengths_on(torch.device("cpu")),
            q.shape[2],
            rank,
            q.shape[3] - rank,
            live.page_size,
            False,
            self._scale,
            q.dtype,
            pool.dtype,
        )
        return wrapper

    def _attend_heads(self, q: Tensor, cache: GQACache) -> AttentionResult:
        num_sequences, window, num_heads, width = q.shape
        if self._planned is None:
            plan = self._plan_decode if window == 1 else self._plan_verify
            self._planned = plan(q, cache)
        k_scale, v_scale = head_scales(cache)
        # Each query by itself: FlashInfer wants equally many heads a KV head, in [tokens, heads].
        folded = self._heads.fold(q.reshape(-1, 1, num_heads, width))
        out, lse = self._planned.run(
            folded.reshape(len(folded), -1, width),
            (cache.key, cache.value),
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=True,
        )
        unfolded = self._heads.unfold(out.view(folded.shape), 1)
        natural = self._heads.unfold(LseBase.TWO.to_natural(lse).view(folded.shape[:3]), 1)
        shape = (num_sequences, window, num_heads)
        return AttentionResult(unfolded.reshape(*shape, width), natural.reshape(shape))

    def _plan_decode(self, q: Tensor, cache: GQACache) -> Any:
        wrapper = self._wrappers.decode
        wrapper.plan(*self._pages(), *self._sizes(cache), **self._options(q, cache))
        return wrapper

    def _plan_verify(self, q: Tensor, cache: GQACache) -> Any:
        wrapper = self._wrappers.verify
        wrapper.plan(
            _starts(len(q), q.shape[1]),
            *self._pages(),
            *self._sizes(cache),
            causal=False,
            **self._options(q, cache),
        )
        return wrapper

    def _pages(self) -> tuple[Tensor, Tensor, Tensor]:
        live = self._live
        return live.page_starts(), live.page_indices(), live.last_page_lengths()

    def _sizes(self, cache: GQACache) -> tuple[int, int, int, int]:
        """Query heads (a full group each), KV heads, head_dim, page_size."""
        num_kv_heads, head_dim = cache.key.shape[2:]
        return num_kv_heads * self._heads.group_size, num_kv_heads, head_dim, self._live.page_size

    def _options(self, q: Tensor, cache: GQACache) -> dict[str, object]:
        return {
            "sm_scale": self._scale,
            "q_data_type": q.dtype,
            "kv_data_type": cache.key.dtype,
        }


def _starts(count: int, step: int) -> Tensor:
    """int32 CPU [count + 1]: 0, step, 2 * step, ..."""
    return step * torch.arange(count + 1, dtype=torch.int32)
