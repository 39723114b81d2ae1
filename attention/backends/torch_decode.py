"""Decode and verify of the torch backend."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attention.backends.decode_segments import Segment, plan_segments
from attention.backends.dense import attend
from attention.backends.scratch import Scratch
from attention.heads import FoldedHeads
from attention.interface import AttentionResult, GQACache, MLACache
from attention.rows import DecodeRows
from attention.stored_rows import StoredPool, StoredRows


class _Keys(NamedTuple):
    """Keys and values of one layer: pool rows [N*P, Hk, width] and the window [B, w, Hk, width].

    In MLA the value is the key's own leading columns, so both name the same rows.
    """

    pool_key: StoredPool
    pool_value: StoredPool
    window_key: Tensor | None
    window_value: Tensor | None


class TorchDecodeKernel:
    """One step's decode attention. Valid until the backend plans the next step."""

    def __init__(
        self,
        rows: DecodeRows,
        *,
        heads: FoldedHeads,
        scale: float,
        value_width: int,
        scratch: Scratch,
        device: torch.device,
    ) -> None:
        self._batch_size = len(rows.committed_lens)
        self._window = rows.window
        self._has_window = rows.has_window
        self._heads = heads
        self._scale = scale
        self._value_width = value_width
        self._scratch = scratch
        self._segments = plan_segments(rows, device)
        self._biases = [self._fold_bias(segment.bias) for segment in self._segments]

    def gqa(
        self, q: Tensor, cache: GQACache, window_key: Tensor | None, window_value: Tensor | None
    ) -> AttentionResult:
        """See DecodeKernel."""
        return self._attend(
            q,
            _Keys(
                StoredPool.of(cache.key, cache.key_scale),
                StoredPool.of(cache.value, cache.value_scale),
                self._split_window(window_key),
                self._split_window(window_value),
            ),
        )

    def mla(self, q: Tensor, cache: MLACache, window_latent: Tensor | None) -> AttentionResult:
        """See DecodeKernel."""
        pool = StoredPool.of(cache.latent, cache.scale).with_one_head()
        window = self._split_window(None if window_latent is None else window_latent[:, None])
        out, lse = self._attend(q, _Keys(pool, pool, window, window))
        return AttentionResult(out[..., : self._value_width], lse)

    def _fold_bias(self, bias: Tensor | None) -> Tensor | None:
        """A row a query becomes a row a (query, head of the group) pair."""
        if bias is None or bias.shape[2] == 1:
            return bias
        return bias.repeat_interleave(self._heads.group_size, dim=2)

    def _split_window(self, window: Tensor | None) -> Tensor | None:
        if not self._has_window:
            return None
        if window is None:
            raise ValueError("DCP rank 0 needs the in-hand rows of a verify step's window")
        return window.view(self._batch_size, self._window, *window.shape[1:])

    def _attend(self, q: Tensor, keys: _Keys) -> AttentionResult:
        num_tokens, num_heads, width = q.shape
        q = q.view(self._batch_size, self._window, num_heads, width)
        if len(self._segments) == 1 and self._segments[0].sequences is None:
            out, lse = self._attend_segment(q, keys, self._segments[0], self._biases[0])
        else:
            out = q.new_zeros(q.shape)
            lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)
            if num_heads:
                self._attend_segments(q, keys, out, lse)
        return AttentionResult(
            out.reshape(num_tokens, num_heads, -1), lse.reshape(num_tokens, num_heads)
        )

    def _attend_segments(self, q: Tensor, keys: _Keys, out: Tensor, lse: Tensor) -> None:
        for segment, bias in zip(self._segments, self._biases, strict=True):
            members = segment.sequences
            assert members is not None
            part = self._attend_segment(q.index_select(0, members), keys, segment, bias)
            out.index_copy_(0, members, part.out)
            lse.index_copy_(0, members, part.lse)

    def _attend_segment(
        self, q: Tensor, keys: _Keys, segment: Segment, bias: Tensor | None
    ) -> AttentionResult:
        """q [n, w, H, width] of the segment's sequences -> out [n, w, H, width], lse [n, w, H]."""
        key = self._collect("key", keys.pool_key, keys.window_key, segment, q.dtype)
        value = key
        if keys.pool_value is not keys.pool_key:
            value = self._collect("value", keys.pool_value, keys.window_value, segment, q.dtype)
        out, lse = attend(self._heads.fold(q), key, value, bias, self._scale)
        return AttentionResult(
            self._heads.unfold(out, self._window), self._heads.unfold(lse, self._window)
        )

    def _collect(
        self,
        name: str,
        pool: StoredPool,
        window: Tensor | None,
        segment: Segment,
        dtype: torch.dtype,
    ) -> Tensor:
        """The segment's keys [n, Hk, num_rows + window keys, width], without a copy if possible."""
        if segment.start is not None:
            run = pool.narrow(segment.start, segment.num_rows)
            return self._values(name, run, dtype).transpose(0, 1)[None]
        if window is not None and segment.sequences is not None:
            window = window.index_select(0, segment.sequences)
        if segment.row_ids is None:
            assert window is not None
            return window.transpose(1, 2)
        rows = pool.rows
        buffer = self._scratch.take(
            name, (len(segment.row_ids), *rows.shape[1:]), rows.dtype, rows.device
        )
        gathered = self._values(name, pool.select(segment.row_ids, out=buffer), dtype)
        gathered = gathered.view(segment.num_sequences, -1, *rows.shape[1:])
        if window is not None:
            gathered[:, segment.num_rows :] = window
        return gathered.transpose(1, 2)

    def _values(self, name: str, stored: StoredRows, dtype: torch.dtype) -> Tensor:
        if stored.scale is None and stored.rows.dtype == dtype:
            return stored.rows
        buffer = self._scratch.take(
            f"{name} values", tuple(stored.rows.shape), dtype, stored.rows.device
        )
        return stored.values(dtype, out=buffer)
