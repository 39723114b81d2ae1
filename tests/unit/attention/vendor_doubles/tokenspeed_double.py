"""tokenspeed_mla.tokenspeed_mla_decode."""

from __future__ import annotations

import torch

from tests.unit.attention.vendor_doubles.recording import (
    BASE_2,
    Record,
    attend_rows,
    paged_rows,
    require,
    require_int32,
)

FP8 = torch.float8_e4m3fn
NUM_SMS = 148


class TokenspeedDouble:
    """base: of the lse, as documented unless a test wants it wrong."""

    def __init__(self, base: float = BASE_2) -> None:
        self.calls: list[Record] = []
        self._base = base

    def tokenspeed_mla_decode(
        self,
        query,
        kv_cache,
        workspace_buffer,
        kv_lora_rank,
        qk_rope_head_dim,
        block_tables,
        seq_lens,
        max_seq_len,
        softmax_scale,
        output_scale=1.0,
        out=None,
        is_var_seq=True,
        causal_mask=True,
        enable_pdl=False,
        return_lse=False,
        causal_seqs=None,
        cp_world=1,
        cp_rank=0,
    ):
        require(query.ndim == 4 and query.is_contiguous(), "query [B, q_len, H, D] contiguous")
        batch, q_len, heads, width = query.shape
        require(width == kv_lora_rank + qk_rope_head_dim == kv_cache.shape[-1], f"width {width}")
        require((kv_lora_rank, qk_rope_head_dim) == (512, 64), "latent 512 + 64")
        require(query.dtype in (torch.bfloat16, torch.float16, FP8), f"dtype {query.dtype}")
        require(query.dtype == kv_cache.dtype, f"{query.dtype} query, {kv_cache.dtype} pool")
        require(kv_cache.is_contiguous(), "kv_cache contiguous")
        require(kv_cache.shape[1] in (32, 64), f"page size {kv_cache.shape[1]}")
        require(1 <= heads <= 128, f"{heads} heads")
        require_int32(block_tables, (batch, block_tables.shape[1]), "block_tables")
        require_int32(seq_lens, (batch,), "seq_lens")
        require(int(seq_lens.min()) >= 1, "a sequence of length 0")
        require(max_seq_len >= int(seq_lens.max()), "max_seq_len is below a length")
        require(isinstance(softmax_scale, float) and isinstance(output_scale, float), "scales")
        require(cp_world == 1 and cp_rank == 0 and causal_seqs is None, "a second division by c")
        require(return_lse, "return_lse")
        require(workspace_buffer.dtype == torch.int8, f"workspace of {workspace_buffer.dtype}")
        split = min(32, max(1, NUM_SMS // batch // (q_len * 2)))
        needed = 0 if split == 1 else batch * heads * q_len * split * (kv_lora_rank + 1) * 4
        require(workspace_buffer.numel() >= needed, f"{workspace_buffer.numel()} of {needed}")
        self.calls.append(
            Record("tokenspeed_mla_decode", {"heads": heads, "batch": batch, "q_len": q_len})
        )
        out_dtype = torch.bfloat16 if query.dtype == FP8 else query.dtype
        result = torch.empty(batch, q_len, heads, kv_lora_rank, dtype=out_dtype)
        logs = torch.empty(batch, q_len, heads)
        for b in range(batch):
            key = paged_rows(kv_cache, block_tables[b], int(seq_lens[b]))[:, None].double()
            attended, natural = attend_rows(
                query[b], key, key[..., :kv_lora_rank], scale=softmax_scale, causal=causal_mask
            )
            result[b] = attended * output_scale
            logs[b] = natural * self._base
        return result, logs
