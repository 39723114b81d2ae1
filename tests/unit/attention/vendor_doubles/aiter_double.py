"""aiter.ops.triton.gluon.mla_gluon.mla_gluon."""

from __future__ import annotations

import torch

from tests.unit.attention.vendor_doubles.recording import (
    BASE_E,
    Record,
    attend_rows,
    require,
    require_int32,
    require_last_dim_dense,
)

FP8 = torch.float8_e4m3fn


class AiterDouble:
    """base: of the lse, as documented unless a test wants it wrong."""

    def __init__(self, base: float = BASE_E) -> None:
        self.calls: list[Record] = []
        self._base = base

    def mla_gluon(
        self,
        q_nope,
        q_pe,
        kv_c,
        o,
        page_table,
        seq_info,
        sm_scale,
        k_pe=None,
        kv_pe_offset=512,
        use_2d_view=True,
        kv_scale=1.0,
        min_kv_seq_len=1,
        return_lse=False,
        has_pe=True,
        attn_sink=None,
    ):
        require(q_nope.ndim == 3, "single queries")
        batch, heads, rank = q_nope.shape
        require(q_nope.dtype == q_pe.dtype == o.dtype == torch.bfloat16, f"{q_nope.dtype} q")
        require(rank == 512 and tuple(q_pe.shape) == (batch, heads, 64), "widths 512 and 64")
        require_last_dim_dense(q_nope, "q_nope")
        require_last_dim_dense(q_pe, "q_pe")
        require(k_pe is None and kv_pe_offset == 512, "one shared buffer")
        require(kv_c.ndim == 2 and kv_c.shape[1] == 576, f"kv_c of {tuple(kv_c.shape)}")
        require_last_dim_dense(kv_c, "kv_c")
        require(o.is_contiguous() and o.shape == q_nope.shape, "o contiguous, as q_nope")
        require(use_2d_view, "2-D table")
        require_int32(page_table, (batch, page_table.shape[1]), "page_table")
        require_int32(seq_info, (batch,), "seq_info")
        lengths = seq_info.tolist()
        require(min(lengths) >= 1, "a sequence of length 0")
        require(min_kv_seq_len == min(lengths), f"min_kv_seq_len {min_kv_seq_len}")
        in_pool = (page_table >= 0) & (page_table < len(kv_c))
        require(bool(in_pool.all()), "rows that the pool does not have")
        self._check_regime(heads, batch, min_kv_seq_len, kv_c.dtype)
        require(isinstance(kv_scale, float), f"kv_scale {kv_scale!r}")
        require(return_lse and has_pe and attn_sink is None, "plain decode with lse")
        self.calls.append(Record("mla_gluon", {"heads": heads, "batch": batch}))
        logs = torch.empty(batch, 1, heads)
        for b, length in enumerate(lengths):
            key = kv_c[page_table[b, :length].long()][:, None].double() * kv_scale
            query = torch.cat([q_nope[b], q_pe[b]], dim=-1)[None]
            attended, natural = attend_rows(
                query, key, key[..., :rank], scale=sm_scale, causal=False
            )
            o[b] = attended[0]
            logs[b] = natural * self._base
        return o, logs

    def _check_regime(self, heads: int, batch: int, shortest: int, kv_dtype: torch.dtype) -> None:
        if heads in (64, 128):
            require(kv_dtype == torch.bfloat16, "64 or 128 heads read bf16 only")
            require(batch % 64 == 0, f"batch {batch} is not a multiple of 64")
            splits = max(1, 1 << (-(-256 // (heads // 64 * batch)) - 1).bit_length())
            require(shortest > splits * (192 + splits), f"{shortest} keys in {splits} splits")
        else:
            require(1 <= heads <= 96, f"{heads} heads")
            require(kv_dtype in (torch.bfloat16, FP8), f"KV {kv_dtype}")
