"""The paged wrappers of FlashInfer 0.6.13. Empty sequences are not allowed: results vary."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tests.unit.attention.vendor_doubles.recording import (
    BASE_2,
    Record,
    attend_rows,
    paged_rows,
    require,
    require_int32,
    require_last_dim_dense,
)

GENERATIONS = ("fa2", "fa3")
FP8 = torch.float8_e4m3fn
_MIN_WORKSPACE = 128 << 20


def flashinfer_double(base: float = BASE_2):
    """(members of flashinfer, members of flashinfer.mla, the calls of all wrappers)."""
    calls: list[Record] = []

    class BatchMLAPagedAttentionWrapper:
        def __init__(
            self,
            float_workspace_buffer,
            use_cuda_graph=False,
            qo_indptr=None,
            kv_indptr=None,
            kv_indices=None,
            kv_len_arr=None,
            backend="auto",
        ):
            require(backend in GENERATIONS, f"backend {backend!r} must be named")
            check_workspace(float_workspace_buffer)
            calls.append(Record("mla wrapper", {"backend": backend}))

        def plan(
            self,
            qo_indptr,
            kv_indptr,
            kv_indices,
            kv_len_arr,
            num_heads,
            head_dim_ckv,
            head_dim_kpe,
            page_size,
            causal,
            sm_scale,
            q_data_type,
            kv_data_type,
            use_profiler=False,
        ):
            batch = len(kv_len_arr)
            require_int32(qo_indptr, (batch + 1,), "qo_indptr")
            require_int32(kv_len_arr, (batch,), "kv_len_arr")
            require((head_dim_ckv, head_dim_kpe) == (512, 64), "latent 512 + 64")
            require(q_data_type == kv_data_type, f"{q_data_type} q, {kv_data_type} KV")
            require(q_data_type in (torch.bfloat16, torch.float16), f"{q_data_type}")
            pages = kv_indptr.diff()
            require(pages.tolist() == [-(-n // page_size) for n in kv_len_arr.tolist()], "pages")
            self._pages = split_pages(kv_indptr, kv_indices)
            self._lengths = kv_len_arr.tolist()
            require(min(self._lengths) >= 1, "a sequence of length 0")
            self._starts = qo_indptr.tolist()
            self._planned = (num_heads, page_size, causal, sm_scale, q_data_type, kv_data_type)
            calls.append(Record("mla plan", {"num_heads": num_heads, "batch": batch}))

        def run(
            self,
            q_nope,
            q_pe,
            ckv_cache,
            kpe_cache,
            out=None,
            lse=None,
            return_lse=False,
            profiler_buffer=None,
            kv_len=None,
            page_table=None,
            return_lse_base_on_e=False,
            o_scale=None,
        ):
            heads, page_size, causal, scale, q_dtype, kv_dtype = self._planned
            require(tuple(q_nope.shape) == (self._starts[-1], heads, 512), f"{q_nope.shape}")
            require(tuple(q_pe.shape) == (self._starts[-1], heads, 64), f"{q_pe.shape}")
            require(tuple(ckv_cache.shape[1:]) == (page_size, 512), f"{ckv_cache.shape}")
            require(tuple(kpe_cache.shape[1:]) == (page_size, 64), f"{kpe_cache.shape}")
            require(q_nope.dtype == q_dtype and ckv_cache.dtype == kv_dtype, "planned dtypes")
            for name, tensor in (("q_nope", q_nope), ("q_pe", q_pe), ("ckv", ckv_cache)):
                require_last_dim_dense(tensor, name)
            require(return_lse and not return_lse_base_on_e, "base 2 lse")
            calls.append(Record("mla run", {"tokens": len(q_nope)}))
            q = torch.cat([q_nope, q_pe], dim=-1)
            results = []
            for b, length in enumerate(self._lengths):
                ckv = paged_rows(ckv_cache, self._pages[b], length)[:, None]
                kpe = paged_rows(kpe_cache, self._pages[b], length)[:, None]
                results.append(
                    attend_rows(
                        q[self._starts[b] : self._starts[b + 1]],
                        torch.cat([ckv, kpe], dim=-1),
                        ckv,
                        scale=scale,
                        causal=causal,
                    )
                )
            return gathered(results, q_dtype, base)

    class _PagedWrapper:
        """What the decode and the prefill wrapper have in common."""

        kind: str

        def _plan(
            self,
            starts: list[int],
            indptr: Tensor,
            indices: Tensor,
            last_page_len: Tensor,
            shape: tuple[int, int, int, int],
            options: tuple[bool, float, torch.dtype, torch.dtype],
        ) -> None:
            batch = len(last_page_len)
            heads, kv_heads, dim, page_size = shape
            require_int32(indptr, (batch + 1,), "indptr")
            require_int32(last_page_len, (batch,), "last_page_len")
            in_page = (last_page_len >= 1) & (last_page_len <= page_size)
            require(bool(in_page.all()), f"last_page_len {last_page_len.tolist()}")
            require(heads % kv_heads == 0, f"{heads} heads over {kv_heads} KV heads")
            require(dim in (64, 128, 256), f"head_dim {dim}")
            self._starts = starts
            self._pages = split_pages(indptr, indices)
            self._lengths = [
                (len(pages) - 1) * page_size + last
                for pages, last in zip(self._pages, last_page_len.tolist(), strict=True)
            ]
            require(min(self._lengths) >= 1, "a sequence of length 0")
            self._shape = shape
            self._options = options
            calls.append(Record(f"{self.kind} plan", {"heads": heads, "batch": batch}))

        def _run(self, q, paged_kv_cache, k_scale, v_scale, return_lse):
            heads, kv_heads, dim, page_size = self._shape
            causal, scale, q_dtype, kv_dtype = self._options
            key, value = paged_kv_cache
            require(tuple(q.shape) == (self._starts[-1], heads, dim), f"{q.shape}")
            require(q.is_contiguous() and q.dtype == q_dtype, f"{q.dtype} q, contiguous")
            for pool in (key, value):
                require(tuple(pool.shape[1:]) == (page_size, kv_heads, dim), f"{pool.shape}")
                require(pool.dtype == kv_dtype, f"{pool.dtype} pool")
            require(isinstance(k_scale, float) and isinstance(v_scale, float), "float scales")
            require(return_lse, "return_lse")
            calls.append(Record(f"{self.kind} run", {"tokens": len(q)}))
            results = []
            for b, length in enumerate(self._lengths):
                attended, natural = attend_rows(
                    q[self._starts[b] : self._starts[b + 1]],
                    paged_rows(key, self._pages[b], length),
                    paged_rows(value, self._pages[b], length),
                    scale=scale * k_scale,
                    causal=causal,
                )
                results.append((attended * v_scale, natural))
            return gathered(results, q_dtype, base)

    class BatchDecodeWithPagedKVCacheWrapper(_PagedWrapper):
        kind = "decode"

        def __init__(
            self,
            float_workspace_buffer,
            kv_layout="NHD",
            use_cuda_graph=False,
            use_tensor_cores=False,
            paged_kv_indptr_buffer=None,
            paged_kv_indices_buffer=None,
            paged_kv_last_page_len_buffer=None,
            backend="auto",
            jit_args=None,
        ):
            require(backend in GENERATIONS and use_tensor_cores, f"backend {backend!r}")
            require(kv_layout == "NHD", kv_layout)
            check_workspace(float_workspace_buffer)

        def plan(
            self,
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode="NONE",
            window_left=-1,
            logits_soft_cap=None,
            q_data_type="float16",
            kv_data_type=None,
            o_data_type=None,
            data_type=None,
            sm_scale=None,
            rope_scale=None,
            rope_theta=None,
            non_blocking=True,
            block_tables=None,
            seq_lens=None,
            fixed_split_size=None,
            disable_split_kv=False,
            q_len_per_req=1,
        ):
            require(sm_scale is not None and kv_data_type is not None, "scale and dtypes given")
            self._plan(
                list(range(len(last_page_len) + 1)),
                indptr,
                indices,
                last_page_len,
                (num_qo_heads, num_kv_heads, head_dim, page_size),
                (False, sm_scale, q_data_type, kv_data_type),
            )

        def run(
            self,
            q,
            paged_kv_cache,
            *args,
            q_scale=None,
            k_scale=None,
            v_scale=None,
            out=None,
            lse=None,
            return_lse=False,
            enable_pdl=None,
            window_left=None,
            sinks=None,
            q_len_per_req=None,
            skip_softmax_threshold_scale_factor=None,
            kv_cache_sf=None,
        ):
            require(not args, "no kernel arguments")
            return self._run(q, paged_kv_cache, k_scale, v_scale, return_lse)

    class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
        kind = "prefill"

        def __init__(
            self,
            float_workspace_buffer,
            kv_layout="NHD",
            use_cuda_graph=False,
            qo_indptr_buf=None,
            paged_kv_indptr_buf=None,
            paged_kv_indices_buf=None,
            paged_kv_last_page_len_buf=None,
            custom_mask_buf=None,
            mask_indptr_buf=None,
            backend="auto",
            jit_args=None,
            jit_kwargs=None,
        ):
            require(backend in GENERATIONS, f"backend {backend!r}")
            require(kv_layout == "NHD", kv_layout)
            check_workspace(float_workspace_buffer)

        def plan(
            self,
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            head_dim_vo=None,
            custom_mask=None,
            packed_custom_mask=None,
            causal=False,
            pos_encoding_mode="NONE",
            use_fp16_qk_reduction=False,
            sm_scale=None,
            window_left=-1,
            logits_soft_cap=None,
            rope_scale=None,
            rope_theta=None,
            q_data_type="float16",
            kv_data_type=None,
            o_data_type=None,
            non_blocking=True,
            prefix_len_ptr=None,
            token_pos_in_items_ptr=None,
            token_pos_in_items_len=0,
            max_item_len_ptr=None,
            seq_lens=None,
            seq_lens_q=None,
            block_tables=None,
            max_token_per_sequence=None,
            max_sequence_kv=None,
            fixed_split_size=None,
            disable_split_kv=False,
        ):
            require(sm_scale is not None and kv_data_type is not None, "scale and dtypes given")
            require_int32(qo_indptr, (len(paged_kv_last_page_len) + 1,), "qo_indptr")
            self._plan(
                qo_indptr.tolist(),
                paged_kv_indptr,
                paged_kv_indices,
                paged_kv_last_page_len,
                (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
                (causal, sm_scale, q_data_type, kv_data_type),
            )

        def run(
            self,
            q,
            paged_kv_cache,
            *args,
            q_scale=None,
            k_scale=None,
            v_scale=None,
            out=None,
            lse=None,
            return_lse=False,
            enable_pdl=None,
            window_left=None,
            sinks=None,
            kv_cache_sf=None,
            skip_softmax_threshold_scale_factor=None,
        ):
            require(not args, "no kernel arguments")
            return self._run(q, paged_kv_cache, k_scale, v_scale, return_lse)

    top = {
        "BatchDecodeWithPagedKVCacheWrapper": BatchDecodeWithPagedKVCacheWrapper,
        "BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper,
    }
    return top, {"BatchMLAPagedAttentionWrapper": BatchMLAPagedAttentionWrapper}, calls


def check_workspace(workspace: Tensor) -> None:
    require(workspace.numel() * workspace.element_size() >= _MIN_WORKSPACE, "workspace too small")
    require(not bool(workspace[: 1 << 20].any()), "the workspace is not zero")


def split_pages(indptr: Tensor, indices: Tensor) -> list[Tensor]:
    starts = indptr.tolist()
    require(indices.dtype == torch.int32, f"indices are {indices.dtype}, not int32")
    require(starts[0] == 0 and len(indices) >= starts[-1], "indices shorter than indptr says")
    return [indices[a:b] for a, b in pairwise(starts)]


def gathered(results, dtype: torch.dtype, base: float) -> tuple[Tensor, Tensor]:
    out = torch.cat([part for part, _ in results]).to(dtype)
    return out, (torch.cat([log for _, log in results]) * base).float()
