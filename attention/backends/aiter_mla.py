"""The Gluon MLA decode kernel of AMD's aiter, on MI350 (gfx950). Natural-log LSE."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from attention.backends.kernel_limits import KernelLimits
from attention.backends.latent_prefix import LatentPrefix
from attention.backends.lse_base import LseBase
from attention.backends.per_tensor_scale import FP8, latent_scale
from attention.backends.vendor_backend import PrefixPlan, VendorBackend
from attention.interface import AttentionResult, MLACache
from attention.rows import rows_of

# Heads of a launch in the regime without further limits.
MAX_HEADS = 96
# Exactly so many heads take another regime: bf16 KV, batches of multiples of 64, long sequences.
RESTRICTED_HEADS = (64, 128)
_TILE_HEADS = 16

LIMITS = KernelLimits(
    vendor="amd",
    architectures=("gfx950",),
    modules={"aiter": "install aiter from AMD", "triton": "install triton 3.7 or newer"},
    oldest={"triton": (3, 7)},
    latent_shapes=((512, 64),),
    dtypes=(torch.bfloat16,),
    latent_kv_dtypes=(FP8,),
)


class AiterBackend(VendorBackend):
    """The `aiter` backend for MLA. Its pages are single tokens: any page size of ours serves."""

    name = "aiter"
    limits = LIMITS

    def _plan_prefix(self, plan: PrefixPlan) -> LatentPrefix:
        return LatentPrefix(_Launch(plan), head_chunks)


def head_chunks(num_heads: int) -> list[int]:
    """Sizes of at most 96 heads, none of them 64.

    The widened head count of a DCP group decides the regime (8 heads on 8 ranks are 64), and the
    restricted one would refuse most batches at launch. Each chunk reads the prefix once.
    """
    sizes = []
    while num_heads > MAX_HEADS or num_heads in RESTRICTED_HEADS:
        size = next(
            size
            for size in range(MAX_HEADS, 0, -_TILE_HEADS)
            if size < num_heads and not {size, num_heads - size}.intersection(RESTRICTED_HEADS)
        )
        sizes.append(size)
        num_heads -= size
    return [*sizes, num_heads]


class _Launch:
    """A LatentLaunch. The token table goes to the device at the first layer's call."""

    def __init__(self, plan: PrefixPlan) -> None:
        self._plan = plan
        self._tables: tuple[Tensor, Tensor] | None = None

    def __call__(self, q: Tensor, cache: MLACache) -> AttentionResult:
        live, rank = self._plan.live, self._plan.value_width
        if self._tables is None:
            self._tables = (live.token_rows(q.device), live.lengths_on(q.device))
        page_table, seq_info = self._tables
        kernel = importlib.import_module("aiter.ops.triton.gluon.mla_gluon").mla_gluon
        out, lse = kernel(
            q[..., :rank],
            q[..., rank:],
            rows_of(cache.latent),
            q.new_empty(*q.shape[:2], rank),
            page_table,
            seq_info,
            self._plan.scale,
            kv_pe_offset=rank,
            use_2d_view=True,
            kv_scale=latent_scale(cache),
            # It bounds the splits: none of them may be empty.
            min_kv_seq_len=min(live.lengths),
            return_lse=True,
        )
        return AttentionResult(out, LseBase.E.to_natural(lse[:, 0]))
