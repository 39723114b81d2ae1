"""flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla of FlashInfer 0.6.13."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.unit.attention.vendor_doubles.recording import (
    BASE_2,
    BASE_E,
    Record,
    attend_rows,
    paged_rows,
    require,
    require_int32,
)

FP8 = torch.float8_e4m3fn
MAX_SEQUENCES = 8192
COUNTER_BYTES = MAX_SEQUENCES * 256 * 4
NUM_SMS = 148
DOCUMENTED_BASES = {"trtllm-gen": BASE_2, "cute-dsl": BASE_E}


class TrtllmDouble:
    """bases: of the lse by kernel, as documented unless a test wants it wrong."""

    def __init__(self, bases: dict[str, float] | None = None) -> None:
        self.calls: list[Record] = []
        self._bases = bases or DOCUMENTED_BASES
        self._known_workspaces: dict[int, str] = {}

    def trtllm_batch_decode_with_kv_cache_mla(
        self,
        query,
        kv_cache,
        workspace_buffer,
        qk_nope_head_dim,
        kv_lora_rank,
        qk_rope_head_dim,
        block_tables,
        seq_lens,
        max_seq_len,
        sparse_mla_top_k=0,
        out=None,
        bmm1_scale=1.0,
        bmm2_scale=1.0,
        sinks=None,
        skip_softmax_threshold_scale_factor=None,
        enable_pdl=None,
        backend="auto",
        is_var_seq=True,
        uses_shared_paged_kv_idx=True,
        lse=None,
        return_lse=False,
        cute_dsl_impl="auto",
    ):
        require(backend in self._bases, f"backend {backend!r} must be named")
        require(qk_nope_head_dim in (128, 64), f"qk_nope_head_dim {qk_nope_head_dim}")
        require(query.ndim == 4 and query.is_contiguous(), "query [B, q_len, H, D] contiguous")
        batch, q_len, heads, width = query.shape
        require(width == kv_lora_rank + qk_rope_head_dim == kv_cache.shape[-1], f"width {width}")
        require(kv_cache.is_contiguous(), "kv_cache contiguous")
        require(query.dtype == kv_cache.dtype, f"{query.dtype} query, {kv_cache.dtype} pool")
        require(query.dtype in (torch.bfloat16, FP8), f"dtype {query.dtype}")
        require(1 <= heads <= 128, f"{heads} heads")
        page_size = kv_cache.shape[1]
        self._check_kernel(backend, kv_lora_rank, page_size)
        require_int32(block_tables, (batch, block_tables.shape[1]), "block_tables")
        require(block_tables.shape[1] * page_size % 128 == 0, "table not padded to 128 tokens")
        in_pool = (block_tables >= 0) & (block_tables < len(kv_cache))
        require(bool(in_pool.all()), "the kernel prefetches pages that the pool does not have")
        require_int32(seq_lens, (batch,), "seq_lens")
        require(int(seq_lens.min()) >= 1, "a sequence of length 0")
        require(max_seq_len >= int(seq_lens.max()), "max_seq_len is below a length")
        require(isinstance(bmm1_scale, float) and isinstance(bmm2_scale, float), "float scales")
        require(return_lse, "return_lse")
        self._check_workspace(workspace_buffer, backend, batch, heads, q_len, kv_lora_rank)
        self.calls.append(
            Record(
                backend,
                {"heads": heads, "batch": batch, "q_len": q_len, "max_seq_len": max_seq_len},
            )
        )
        result = torch.empty(batch, q_len, heads, kv_lora_rank, dtype=torch.bfloat16)
        logs = torch.empty(batch, q_len, heads)
        for b in range(batch):
            key = paged_rows(kv_cache, block_tables[b], int(seq_lens[b]))[:, None].double()
            value = key[..., :kv_lora_rank]
            attended, natural = attend_rows(query[b], key, value, scale=bmm1_scale, causal=True)
            result[b] = attended * bmm2_scale
            logs[b] = natural * self._bases[backend]
        return result, logs.view(batch * q_len, heads)

    def _check_kernel(self, backend: str, rank: int, page_size: int) -> None:
        if backend == "trtllm-gen":
            require(rank in (512, 256), f"rank {rank}")
            require(page_size in (32, 64), f"page size {page_size}")
        else:
            require(rank == 512, f"rank {rank}")
            require(page_size > 1 and 128 % page_size == 0, f"page size {page_size}")

    def _check_workspace(
        self, workspace: Tensor, backend: str, batch: int, heads: int, q_len: int, rank: int
    ) -> None:
        require(workspace.dtype == torch.int8, f"workspace of {workspace.dtype}")
        key = workspace.data_ptr()
        require(self._known_workspaces.setdefault(key, backend) == backend, "shared workspace")
        if backend == "trtllm-gen":
            require(batch <= MAX_SEQUENCES, f"counters of {batch} sequences")
            require(not bool(workspace[:COUNTER_BYTES].any()), "counters are not zero")
            slab = 8 * heads * batch * -(-q_len // 256) * 256 + (1 << 20)
            require(workspace.numel() >= COUNTER_BYTES + slab, "no room for the LSE slab")
            # Partial results of splits; what is left of them must not matter.
            workspace[COUNTER_BYTES : COUNTER_BYTES + 64] = 77
            return
        split = min(32, max(1, NUM_SMS // batch // (q_len * 2)))
        needed = 0 if split == 1 else batch * split * max(heads, 128) * q_len * (rank + 1) * 4
        require(workspace.numel() >= needed, f"{workspace.numel()} bytes of {needed}")
