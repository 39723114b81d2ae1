"""The MLA decode kernel of tokenspeed-mla, on Blackwell. LSE of base 2."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention.backends.kernel_limits import KernelLimits
from attention.backends.latent_prefix import LatentPrefix, chunks_up_to
from attention.backends.lse_base import LseBase
from attention.backends.per_tensor_scale import FP8, latent_scale, query_as
from attention.backends.split_workspace import split_workspace_bytes
from attention.backends.vendor_backend import PrefixPlan, VendorBackend
from attention.backends.zeroed_workspace import ZeroedWorkspace
from attention.interface import AttentionResult, MLACache

if TYPE_CHECKING:
    from attention.dispatch import AttentionNeeds

MAX_HEADS = 128

# The package imports without its runtime and then fails at the first call, so the runtime is
# looked for as well.
LIMITS = KernelLimits(
    vendor="nvidia",
    architectures=("sm100", "sm103"),
    modules={
        "tokenspeed_mla": "install tokenspeed-mla",
        "cutlass": "install nvidia-cutlass-dsl",
    },
    latent_shapes=((512, 64),),
    dtypes=(torch.bfloat16, torch.float16),
    latent_kv_dtypes=(FP8,),
    page_sizes=(32, 64),
)


class TokenspeedMlaBackend(VendorBackend):
    """The `tokenspeed_mla` backend for MLA."""

    name = "tokenspeed_mla"
    limits = LIMITS

    def __init__(self) -> None:
        super().__init__()
        self._workspace = ZeroedWorkspace()

    def refusals(self, needs: AttentionNeeds) -> list[str]:
        """Also float16 over an fp8 pool: the kernel's output is bfloat16 then."""
        reasons = super().refusals(needs)
        if needs.kv_dtype == FP8 and needs.dtype == torch.float16:
            reasons.append("dtype torch.float16 over an fp8 pool is not torch.bfloat16")
        return reasons

    def _plan_prefix(self, plan: PrefixPlan) -> LatentPrefix:
        return LatentPrefix(_Launch(plan, self._workspace), chunks_up_to(MAX_HEADS))


class _Launch:
    """A LatentLaunch. The tables go to the device at the first layer's call.

    One query a sequence needs no bound on what it sees beyond its rank-local length, so the
    kernel's own notion of a stripe (causal_seqs, cp_world, cp_rank) stays off: the wrapper
    subtracts the rank, the kernel divides by the world, and doing so here as well is a known bug.
    """

    def __init__(self, plan: PrefixPlan, workspace: ZeroedWorkspace) -> None:
        self._plan = plan
        self._workspace = workspace
        self._tables: tuple[Tensor, Tensor] | None = None

    def __call__(self, q: Tensor, cache: MLACache) -> AttentionResult:
        live, rank = self._plan.live, self._plan.value_width
        if self._tables is None:
            self._tables = (live.padded_table(1, q.device), live.lengths_on(q.device))
        block_tables, seq_lens = self._tables
        batch_size, num_heads, width = q.shape
        num_bytes = split_workspace_bytes(batch_size, num_heads, rank, q.device)
        kv_scale = latent_scale(cache)
        out, lse = importlib.import_module("tokenspeed_mla").tokenspeed_mla_decode(
            query=query_as(q, cache.latent.dtype)[:, None],
            kv_cache=cache.latent,
            workspace_buffer=self._workspace.take(num_bytes, q.device),
            kv_lora_rank=rank,
            qk_rope_head_dim=width - rank,
            block_tables=block_tables,
            seq_lens=seq_lens,
            max_seq_len=max(live.lengths),
            softmax_scale=self._plan.scale * kv_scale,
            output_scale=kv_scale,
            return_lse=True,
        )
        return AttentionResult(out[:, 0], LseBase.TWO.to_natural(lse[:, 0]))
