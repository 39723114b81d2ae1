"""Extend of the torch backend: causal attention over [prefix | chunk], sequence by sequence."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from attention.backends.dense import attend_causal, lower_right_mask
from attention.heads import FoldedHeads
from attention.interface import LatentExpansion
from attention.rows import ExtendRows

# Queries attended to at once where a prefix makes a mask necessary; bounds the mask's size.
_BLOCK_QUERIES = 256


class TorchExtendKernel:
    """One step's extend attention."""

    def __init__(
        self, rows: ExtendRows, *, heads: FoldedHeads, scale: float, device: torch.device
    ) -> None:
        self._prefixes = [slice(a, b) for a, b in pairwise(accumulate(rows.prefix_lens, initial=0))]
        self._chunks = [slice(a, b) for a, b in pairwise(accumulate(rows.chunk_lens, initial=0))]
        self._heads = heads
        self._scale = scale
        totals = [p + c for p, c in zip(rows.prefix_lens, rows.chunk_lens, strict=True)]
        self._mask = lower_right_mask(
            min(_BLOCK_QUERIES, max(rows.chunk_lens, default=0)), max(totals, default=0), device
        )

    def gqa(
        self,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        prefix_key: Tensor | None,
        prefix_value: Tensor | None,
    ) -> Tensor:
        """See ExtendKernel."""
        out = q.new_empty(q.shape[0], q.shape[1], value.shape[-1])
        for prefix, chunk in zip(self._prefixes, self._chunks, strict=True):
            if q.shape[1] and chunk.stop > chunk.start:
                out[chunk] = self._attend_gqa(
                    q[chunk],
                    _after_prefix(prefix_key, prefix, key[chunk]),
                    _after_prefix(prefix_value, prefix, value[chunk]),
                )
        return out

    def _attend_gqa(self, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """q [m, Hl, D], key and value [n, Hk, D] -> [m, Hl, D]."""
        heads = self._heads
        num_queries = q.shape[0]
        if not heads.is_even:
            key, value = (
                rows[:, heads.kv_heads.start : heads.kv_heads.stop]
                .index_select(1, heads.kv_index)
                .transpose(0, 1)[None]
                for rows in (key, value)
            )
            out = attend_causal(q.transpose(0, 1)[None], key, value, self._mask, self._scale)
            return out[0].transpose(0, 1)
        # A KV head is a batch entry whose heads share their keys through a zero stride.
        shape = (len(heads.kv_heads), heads.group_size)
        key, value = (
            rows[:, heads.kv_heads.start : heads.kv_heads.stop]
            .transpose(0, 1)[:, None]
            .expand(*shape, -1, -1)
            for rows in (key, value)
        )
        folded = q.reshape(num_queries, *shape, -1).permute(1, 2, 0, 3)
        out = attend_causal(folded, key, value, self._mask, self._scale)
        return out.permute(2, 0, 1, 3).reshape(num_queries, heads.num_q_heads, -1)

    def mla(
        self, q: Tensor, latent: Tensor, prefix: Tensor | None, expansion: LatentExpansion
    ) -> Tensor:
        """See ExtendKernel."""
        out = q.new_empty(q.shape[0], q.shape[1], expansion.w_vc.shape[-1])
        for span, chunk in zip(self._prefixes, self._chunks, strict=True):
            if q.shape[1] and chunk.stop > chunk.start:
                rows = _after_prefix(prefix, span, latent[chunk])
                out[chunk] = self._attend_mla(q[chunk], rows, expansion)
        return out

    def _attend_mla(self, q: Tensor, latent: Tensor, expansion: LatentExpansion) -> Tensor:
        """q [m, Hl, dn + dr], latent [n, R + Rr] -> [m, Hl, dv]."""
        num_heads, _, rank = expansion.w_kc.shape
        compressed, rope_key = latent[:, :rank], latent[:, rank:]
        key_nope = torch.matmul(compressed, expansion.w_kc.transpose(1, 2))
        key = torch.cat([key_nope, rope_key.expand(num_heads, -1, -1)], dim=-1)
        value = torch.matmul(compressed, expansion.w_vc)
        out = attend_causal(
            q.transpose(0, 1)[None], key[None], value[None], self._mask, self._scale
        )
        return out[0].transpose(0, 1)


def _after_prefix(prefix: Tensor | None, span: slice, chunk: Tensor) -> Tensor:
    """Rows of one sequence in position order."""
    if prefix is None or span.stop == span.start:
        return chunk
    return torch.cat([prefix[span], chunk])
