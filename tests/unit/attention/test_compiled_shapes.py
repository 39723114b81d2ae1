"""Decode kernels compiled for GPUs that are not here: what a launch asks for is there."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch

from attention.backends.triton_backend import TritonBackend
from attention.interface import DecodeBatch, GQACache, MLACache
from attention.layout import StripeLayout
from attention.rows import decode_rows

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is absent"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
ADA = ("cuda", 89, 32)
MI300 = ("hip", "gfx942", 64)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int16: "*i16",
    torch.int32: "*i32",
}


@dataclass
class Recorder:
    """Stands in for a kernel and keeps the arguments of its launch."""

    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, grid: tuple[int, int]) -> Recorder:
        return self

    def __call__(self, *arguments: object, **options: object) -> None:
        self.arguments, self.options = arguments, options


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


def shared_bytes(kernel: Any, launch: Recorder, target: tuple[Any, ...]) -> int:
    """Of shared memory, of the kernel compiled for the recorded launch on `target`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {key: x for key, x in launch.options.items() if key in kernel.arg_names}
    options = {key: x for key, x in launch.options.items() if key not in kernel.arg_names}
    signature = {name: "constexpr" for name in kernel.arg_names}
    attributes = {}
    for i, (name, x) in enumerate(zip(kernel.arg_names, launch.arguments, strict=False)):
        is_tensor = isinstance(x, torch.Tensor)
        signature[name] = TYPES[x.dtype] if is_tensor else "fp32" if type(x) is float else "i32"
        if is_tensor or signature[name] == "i32":
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget(*target), options=options)
    return int(compiled.metadata.shared)


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
