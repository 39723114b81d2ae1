"""Decode kernels compiled for GPUs that are not here: what a launch asks for is there."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest
import torch

from attention.backends.triton_backend import TritonBackend
from attention.interface import DecodeBatch, GQACache, MLACache
from attention.layout import StripeLayout
from attention.rows import decode_rows
from tests.unit.attention.compiled_kernel import Recorder, shared_bytes

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is absent"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
ADA = ("cuda", 89, 32)
MI300 = ("hip", "gfx942", 64)


def launch_mla(kv_dtype: torch.dtype, heads: int, window: int = 1) -> None:
    pool = torch.zeros(4, 64, 576).to(kv_dtype)
    cache = MLACache(pool, torch.ones(4, 64) if kv_dtype == FP8 else None)
    q = torch.zeros(2 * window, heads, 576, dtype=BF16)
    plan(heads, 512, window).mla_splits(q, cache, q[:, 0])


def launch_gqa(heads: int, dim: int) -> None:
    pool = torch.zeros(4, 64, 1, dim, dtype=BF16)
    q = torch.zeros(2, heads, dim, dtype=BF16)
    plan(heads, dim).gqa_splits(q, GQACache(pool, pool), None, None)


def plan(heads: int, value_width: int, window: int = 1) -> Any:
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    batch = DecodeBatch(torch.tensor([100, 40]), table, window)
    return TritonBackend().plan_decode(
        decode_rows(batch, StripeLayout(1, 0, 64)),
        kv_index=(0,) * heads,
        scale=1.0,
        value_width=value_width,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize(
    ("target", "limit", "name", "launch"),
    [
        # As start-up accepts them; in Hopper's shapes these took 113, 108, 72 and 96 KiB.
        (ADA, 99 << 10, "split_fp8", lambda: launch_mla(FP8, 16, window=2)),
        (MI300, 64 << 10, "split_attention", lambda: launch_mla(BF16, 16)),
        (MI300, 64 << 10, "split_attention", lambda: launch_mla(BF16, 16, window=2)),
        (MI300, 64 << 10, "split_attention", lambda: launch_gqa(4, 128)),
    ],
    ids=["ada, 8-bit latents", "mi300, latents", "mi300, window", "mi300, keys of 128"],
)
def test_a_launch_fits_the_shared_memory_of_smaller_gpus(
    target: tuple[Any, ...],
    limit: int,
    name: str,
    launch: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    from attention.backends import (
        decode_launch,
        split_launch,
        triton_fp8_kernel,
        triton_kernels,
    )

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(decode_launch, "shared_memory", lambda device: limit)
    monkeypatch.setattr(split_launch, "unpacks_fp8", lambda device: target == ADA)
    module: ModuleType = triton_fp8_kernel if name == "split_fp8" else triton_kernels
    kernel, recorder = getattr(module, name), Recorder()
    monkeypatch.setattr(module, name, recorder)
    launch()
    assert 0 < shared_bytes(kernel, recorder, target) <= limit
