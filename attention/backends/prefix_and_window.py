"""Decode and verify out of a kernel that can only attend to a paged prefix.

A verify step of a striped cache is two segments: the committed prefix, of which all queries of the
window see all that this rank has, and the window itself, which is dense, causal or full, the same
on every rank and therefore counted on DCP rank 0 only. No kernel needs a mask for the first; the
second is small. Both partial results are merged by their lse.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from attention.backends.dense import attend
from attention.backends.live_prefix import LivePrefix
from attention.heads import FoldedHeads, fold_heads
from attention.interface import AttentionResult, GQACache, MLACache
from attention.merge import merge
from attention.rows import DecodeRows

_NO_KEYS = float("-inf")


class PrefixKernel(Protocol):
    """Attention without a mask over the committed prefixes of a LivePrefix, planned for a step."""

    def attend(self, q: Tensor, cache: GQACache | MLACache) -> AttentionResult:
        """q [n, w, H, W] of the live sequences -> out [n, w, H, Dv] in the dtype of q and
        natural-log float32 lse [n, w, H]."""
        ...


class PrefixAndWindowKernel:
    """A DecodeKernel: `prefix` over the pool, torch over the window's in-hand keys."""

    def __init__(
        self,
        rows: DecodeRows,
        *,
        live: LivePrefix,
        prefix: PrefixKernel,
        kv_index: tuple[int, ...],
        scale: float,
        value_width: int,
        device: torch.device,
    ) -> None:
        self._window_size = rows.window
        self._live = live
        self._prefix = prefix
        self._value_width = value_width
        self._window = None
        if rows.has_window:
            self._window = _DenseWindow(rows, fold_heads(kv_index, device), scale, device)

    def gqa(
        self, q: Tensor, cache: GQACache, window_key: Tensor | None, window_value: Tensor | None
    ) -> AttentionResult:
        """See DecodeKernel."""
        return self._attend(q, cache, window_key, window_value)

    def mla(self, q: Tensor, cache: MLACache, window_latent: Tensor | None) -> AttentionResult:
        """See DecodeKernel."""
        window = None if window_latent is None else window_latent[:, None]
        return self._attend(q, cache, window, window)

    def _attend(
        self,
        q: Tensor,
        cache: GQACache | MLACache,
        window_key: Tensor | None,
        window_value: Tensor | None,
    ) -> AttentionResult:
        num_tokens, num_heads, width = q.shape
        if not q.numel():
            out = q.new_empty(num_tokens, num_heads, self._value_width)
            return AttentionResult(out, q.new_empty(num_tokens, num_heads, dtype=torch.float32))
        queries = q.view(-1, self._window_size, num_heads, width)
        partial = self._attend_prefix(queries, cache)
        if self._window is not None:
            if window_key is None or window_value is None:
                raise ValueError("DCP rank 0 needs the in-hand rows of a verify step's window")
            window = self._window.attend(queries, window_key, window_value)
            out = torch.stack([partial.out, window.out[..., : self._value_width]]).flatten(1, 2)
            lse = torch.stack([partial.lse, window.lse]).flatten(1, 2)
            return merge(out, lse)
        return AttentionResult(partial.out.flatten(0, 1), partial.lse.flatten(0, 1))

    def _attend_prefix(self, q: Tensor, cache: GQACache | MLACache) -> AttentionResult:
        """[B, w, H, Dv] and [B, w, H]; (0, -inf) written here where this rank has no keys."""
        members = self._live.sequences
        if members is None:
            return self._prefix.attend(q, cache)
        out = q.new_zeros(*q.shape[:3], self._value_width)
        lse = q.new_full(q.shape[:3], _NO_KEYS, dtype=torch.float32)
        if self._live.lengths:
            part = self._prefix.attend(q.index_select(0, members), cache)
            out.index_copy_(0, members, part.out)
            lse.index_copy_(0, members, part.lse)
        return AttentionResult(out, lse)


class _DenseWindow:
    """Attention of each sequence's window over its own in-hand keys."""

    def __init__(
        self, rows: DecodeRows, heads: FoldedHeads, scale: float, device: torch.device
    ) -> None:
        self._size = rows.window
        self._heads = heads
        self._scale = scale
        self._is_padding = torch.tensor(rows.is_padding).to(device)
        self._bias: Tensor | None = None
        if rows.window_mask == "causal":
            hidden = torch.ones(rows.window, rows.window, dtype=torch.bool).triu_(1)
            bias = torch.zeros(hidden.shape).masked_fill_(hidden, _NO_KEYS)
            folded = bias.repeat_interleave(heads.group_size, dim=0)
            self._bias = folded[None, None].to(device)

    def attend(self, q: Tensor, key: Tensor, value: Tensor) -> AttentionResult:
        """q [B, w, H, W], key and value [B*w, Hk, W] -> out [B, w, H, W], lse [B, w, H]."""
        size = self._size
        out, lse = attend(
            self._heads.fold(q),
            key.view(-1, size, *key.shape[1:]).transpose(1, 2),
            value.view(-1, size, *value.shape[1:]).transpose(1, 2),
            self._bias,
            self._scale,
        )
        is_padding = self._is_padding[:, None, None]
        return AttentionResult(
            self._heads.unfold(out, size).masked_fill(is_padding[..., None], 0.0),
            self._heads.unfold(lse, size).masked_fill(is_padding, _NO_KEYS),
        )
