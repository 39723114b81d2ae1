"""NVIDIA GPUs before sm80: start-up refuses what does not fit and dtypes that they do not have.

No such GPU is here: kernels are compiled for one, and what they ask for is compared with what is
refused.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from attention.accelerator import Accelerator
from attention.backends.flashinfer_backend import FlashInferBackend
from attention.backends.triton_backend import TritonBackend
from attention.dispatch import AttentionNeeds, UnsupportedCombination, choose
from attention.interface import DecodeBatch, GQAGeometry, MLACache, MLAGeometry
from attention.layout import StripeLayout
from attention.rows import ExtendRows, decode_rows
from tests.unit.attention.compiled_kernel import Recorder, shared_bytes
from tests.unit.attention.vendor_doubles.machine import TURING, VOLTA, pretend

CPU = torch.device("cpu")
SM75, SM75_BYTES = ("cuda", 75, 32), 64 << 10
ALL = frozenset({"decode", "verify", "extend"})


def latents(dtype: torch.dtype, rank: int = 512, head_dim: int = 128) -> AttentionNeeds:
    return AttentionNeeds(
        geometry=MLAGeometry(rank, head_dim, 64, head_dim, 0.1),
        num_q_heads=16,
        num_kv_heads=1,
        page_size=64,
        device="cuda",
        dtype=dtype,
        kv_dtype=dtype,
        operations=ALL,
    )


def heads_of(dim: int, dtype: torch.dtype) -> AttentionNeeds:
    return replace(latents(dtype), geometry=GQAGeometry(dim, 0.1))


def test_every_reason_is_given_together(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, TURING)
    with pytest.raises(UnsupportedCombination) as refused:
        choose(latents(torch.bfloat16, head_dim=192), backend="triton")
    assert refused.value.reasons == (
        "GPU sm75 has no torch.bfloat16, sm80 and newer have: torch.float16 and torch.float32 are "
        "served",
        "backend triton: decode of kv_lora_rank 512 needs 100 KiB of shared memory in "
        "torch.bfloat16; GPU sm75 has 64 KiB",
        "backend triton: extend with heads of 192 needs 96 KiB of shared memory in "
        "torch.bfloat16; GPU sm75 has 64 KiB",
    )


@pytest.mark.parametrize("gpu", [VOLTA, TURING])
def test_what_torch_would_emulate_is_refused_for_every_backend(
    gpu: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, gpu)
    with pytest.raises(UnsupportedCombination, match=f"GPU {gpu.architecture} has no torch.bfloat"):
        choose(heads_of(64, torch.bfloat16), backend="torch")


@pytest.mark.parametrize(
    ("gpu", "needs", "expected"),
    [
        (TURING, latents(torch.float16), "torch"),
        (TURING, latents(torch.float32), "torch"),
        (VOLTA, latents(torch.float32), "triton"),
        (TURING, latents(torch.float16, rank=256), "triton"),
        (TURING, heads_of(128, torch.float16), "triton"),
        (TURING, heads_of(256, torch.float32), "torch"),
    ],
    ids=lambda value: getattr(value, "architecture", None),
)
def test_auto_takes_what_fits(
    gpu: Accelerator, needs: AttentionNeeds, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, gpu, {"triton": (3, 9)})
    assert choose(needs).backend.name == expected


def test_flashinfer_has_no_tile_for_latents_that_small_and_nothing_for_older_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = {"operations": frozenset({"decode"})}
    pretend(monkeypatch, TURING)
    assert FlashInferBackend().refusals(replace(latents(torch.float16), **decode)) == [
        "MLA needs 92672 bytes of shared memory; GPU sm75 has 65536"
    ]
    assert FlashInferBackend().refusals(replace(heads_of(128, torch.float16), **decode)) == []
    pretend(monkeypatch, VOLTA)
    assert FlashInferBackend().refusals(replace(heads_of(128, torch.float16), **decode)) == [
        "GPU sm70 is older than sm75"
    ]


def decode(needs: AttentionNeeds) -> None:
    rank = needs.geometry.kv_lora_rank
    kernel = TritonBackend().plan_decode(
        decode_rows(
            DecodeBatch(torch.tensor([100]), torch.arange(2, dtype=torch.int32)[None]),
            StripeLayout(1, 0, 64),
        ),
        kv_index=(0,) * needs.num_q_heads,
        scale=1.0,
        value_width=rank,
        device=CPU,
    )
    pool = torch.zeros(2, 64, rank + 64, dtype=needs.dtype)
    q = torch.zeros(1, needs.num_q_heads, rank + 64, dtype=needs.dtype)
    kernel.mla_splits(q, MLACache(pool), None)


def extend(needs: AttentionNeeds) -> None:
    dim = needs.geometry.head_dim
    kernel = TritonBackend().plan_extend(
        ExtendRows((0,), (64,)), kv_index=(0,) * 4, scale=1.0, device=CPU
    )
    q, key = (torch.zeros(64, heads, dim, dtype=needs.dtype) for heads in (4, 1))
    kernel.gqa(q, key, key, None, None)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is absent")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("launch", "needs", "fits"),
    [
        (decode, latents(torch.float32), False),
        (decode, latents(torch.float16, rank=256), True),
        (extend, heads_of(256, torch.float32), False),
    ],
    ids=["latents", "narrow latents", "wide heads in extend"],
)
def test_what_is_refused_is_what_does_not_fit_as_compiled(
    launch: Callable[[AttentionNeeds], None],
    needs: AttentionNeeds,
    fits: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: object,
) -> None:
    from attention.backends import (
        decode_launch,
        triton_extend,
        triton_extend_kernels,
        triton_kernels,
    )

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(decode_launch, "shared_memory", lambda device: SM75_BYTES)
    monkeypatch.setattr(triton_extend, "_has_tma", lambda device: False)
    name = "split_attention" if launch is decode else "extend_attention"
    module: ModuleType = triton_kernels if launch is decode else triton_extend_kernels
    kernel, recorder = getattr(module, name), Recorder()
    monkeypatch.setattr(module, name, recorder)
    launch(needs)
    assert (0 < shared_bytes(kernel, recorder, SM75) <= SM75_BYTES) is fits
    pretend(monkeypatch, TURING)
    operation = frozenset({launch.__name__})
    assert (TritonBackend().refusals(replace(needs, operations=operation)) == []) is fits
