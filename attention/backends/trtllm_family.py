"""Both kernels behind FlashInfer's trtllm_batch_decode_with_kv_cache_mla, on Blackwell."""

from __future__ import annotations

import importlib
from abc import abstractmethod

import torch
from torch import Tensor

from attention.backends.latent_prefix import LatentPrefix, chunks_up_to
from attention.backends.lse_base import LseBase
from attention.backends.per_tensor_scale import latent_scale, query_as
from attention.backends.vendor_backend import PrefixPlan, VendorBackend
from attention.backends.zeroed_workspace import ZeroedWorkspace
from attention.interface import AttentionResult, MLACache

# Rows of the kernels' matrix tile. A launch never gets more heads, so its counters and
# workspaces are sized by min(widened heads x window, MAX_HEADS).
MAX_HEADS = 128
# The page table covers a multiple of this many tokens.
_TABLE_TOKENS = 128
# "Must be 128 or 64": the width before absorption that goes with each latent rank.
_NOPE_WIDTH = {512: 128, 256: 64}


class TrtllmFamilyBackend(VendorBackend):
    """An MLA backend of one of the kernels.

    kernel: what the call names it. Never "auto", which may change the base of the lse with the
    query's layout (FlashInfer issue 4485).
    """

    kernel: str
    lse_base: LseBase

    def __init__(self) -> None:
        super().__init__()
        self._workspace = ZeroedWorkspace()

    @abstractmethod
    def workspace_bytes(
        self, batch_size: int, num_heads: int, rank: int, device: torch.device
    ) -> int:
        """Bytes that a launch needs for so many sequences and heads of latent width `rank`."""

    def workspace(self, batch_size: int, num_heads: int, rank: int, device: torch.device) -> Tensor:
        """int8, zero when first used."""
        num_bytes = self.workspace_bytes(batch_size, num_heads, rank, device)
        return self._workspace.take(num_bytes, device)

    def _plan_prefix(self, plan: PrefixPlan) -> LatentPrefix:
        return LatentPrefix(_Launch(self, plan), chunks_up_to(MAX_HEADS))


class _Launch:
    """A LatentLaunch. The tables go to the device at the first layer's call."""

    def __init__(self, backend: TrtllmFamilyBackend, plan: PrefixPlan) -> None:
        self._backend = backend
        self._plan = plan
        self._tables: tuple[Tensor, Tensor] | None = None

    def __call__(self, q: Tensor, cache: MLACache) -> AttentionResult:
        live, rank = self._plan.live, self._plan.value_width
        batch_size, num_heads, width = q.shape
        block_tables, seq_lens = self._on_device(q.device)
        kv_scale = latent_scale(cache)
        decode = importlib.import_module("flashinfer.mla").trtllm_batch_decode_with_kv_cache_mla
        out, lse = decode(
            query=query_as(q, cache.latent.dtype)[:, None],
            kv_cache=cache.latent,
            workspace_buffer=self._backend.workspace(batch_size, num_heads, rank, q.device),
            qk_nope_head_dim=_NOPE_WIDTH[rank],
            kv_lora_rank=rank,
            qk_rope_head_dim=width - rank,
            block_tables=block_tables,
            seq_lens=seq_lens,
            max_seq_len=max(live.lengths),
            # Keys and values are the same rows, so one scale serves both products.
            bmm1_scale=self._plan.scale * kv_scale,
            bmm2_scale=kv_scale,
            backend=self._backend.kernel,
            return_lse=True,
        )
        natural = self._backend.lse_base.to_natural(lse)
        return AttentionResult(out[:, 0], natural.view(batch_size, num_heads))

    def _on_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._tables is None:
            live = self._plan.live
            multiple = max(1, _TABLE_TOKENS // live.page_size)
            self._tables = (live.padded_table(multiple, device), live.lengths_on(device))
        return self._tables
