"""Attention of one step: writes the KV rows, then splits tokens into decode windows and chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.dcp import DcpAttention, DecodePlan, ExtendPlan
from attention.interface import GQACache, LatentExpansion, MLACache
from attention.kv_rows import WritePlan
from kvbraid.kv.page_pool import StripedPagePool


@dataclass(frozen=True, slots=True)
class StepAttention:
    """Implements `kvbraid.model.attention_port.LayerAttention` for one step of one rank.

    The first `num_decode_tokens` tokens are decode windows, the rest prompt chunks; plans are
    built once for all layers.
    """

    attention: DcpAttention
    pool: StripedPagePool
    write_plan: WritePlan
    num_decode_tokens: int
    decode_plan: DecodePlan | None
    extend_plan: ExtendPlan | None

    def gqa(self, layer: int, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See LayerAttention.gqa."""
        self.pool.write(layer, self.write_plan, key, value)
        cache = self.pool.layer(layer)
        assert isinstance(cache, GQACache)
        n, parts = self.num_decode_tokens, []
        if self.decode_plan is not None:
            parts.append(
                self.attention.gqa_decode(q[:n], cache, key[:n], value[:n], self.decode_plan)
            )
        if self.extend_plan is not None:
            own = self.attention.own_heads(q[n:])
            parts.append(
                self.attention.gqa_extend(own, key[n:], value[n:], cache, self.extend_plan)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def mla(
        self, layer: int, q_nope: Tensor, q_pe: Tensor, latent: Tensor, expansion: LatentExpansion
    ) -> Tensor:
        """See LayerAttention.mla. Decode is absorbed (queries in latent space), chunks are MHA."""
        self.pool.write(layer, self.write_plan, latent)
        cache = self.pool.layer(layer)
        assert isinstance(cache, MLACache)
        n, parts = self.num_decode_tokens, []
        own_expansion = LatentExpansion(*(self.attention.own_heads(w, dim=0) for w in expansion))
        if self.decode_plan is not None:
            # [n, H, dn] x [H, dn, R] -> [n, H, R]
            q_latent = torch.bmm(q_nope[:n].transpose(0, 1), expansion.w_kc).transpose(0, 1)
            out = self.attention.mla_decode(q_latent, q_pe[:n], cache, latent[:n], self.decode_plan)
            parts.append(torch.bmm(out.transpose(0, 1), own_expansion.w_vc).transpose(0, 1))
        if self.extend_plan is not None:
            q = self.attention.own_heads(torch.cat((q_nope[n:], q_pe[n:]), dim=-1))
            parts.append(
                self.attention.mla_extend(q, latent[n:], cache, own_expansion, self.extend_plan)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
