"""Start-up refuses what a vendor's kernel would refuse at launch, with the value and the range."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention.accelerator import Accelerator
from attention.backends.flashinfer_backend import FlashInferBackend
from attention.dispatch import BACKENDS, AttentionNeeds
from attention.interface import GQAGeometry, MLAGeometry
from tests.unit.attention.vendor_doubles.machine import (
    AMPERE,
    BLACKWELL,
    HOPPER,
    MI350,
    PACKAGES,
    pretend,
)

FP8 = torch.float8_e4m3fn
MLA = AttentionNeeds(
    geometry=MLAGeometry(512, 128, 64, 128, 192**-0.5),
    num_q_heads=128,
    num_kv_heads=1,
    tp_size=8,
    dcp_size=8,
    page_size=64,
    device="cuda",
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    operations=frozenset({"decode", "verify"}),
)
GQA = replace(MLA, geometry=GQAGeometry(128, 128**-0.5), num_q_heads=32, num_kv_heads=8, dcp_size=1)
GPUS = {
    "flashinfer": HOPPER,
    "trtllm_mla": BLACKWELL,
    "cutedsl_mla": BLACKWELL,
    "tokenspeed_mla": Accelerator("nvidia", "sm103"),
    "aiter": MI350,
}
LATENT_ONLY = [name for name in GPUS if name != "flashinfer"]
NARROW = MLAGeometry(64, 32, 16, 32, 0.1)


def refusals(name: str, needs: AttentionNeeds) -> list[str]:
    return BACKENDS[name]().refusals(needs)


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("dcp_size", [1, 2, 4, 8])
def test_on_its_own_gpu_each_serves_all_operations(name, dcp_size, monkeypatch):
    pretend(monkeypatch, GPUS[name])
    operations = frozenset({"decode", "verify", "extend"})
    assert refusals(name, replace(MLA, dcp_size=dcp_size, operations=operations)) == []


def test_flashinfer_serves_gqa_too(monkeypatch):
    pretend(monkeypatch, HOPPER)
    assert refusals("flashinfer", GQA) == []
    assert refusals("flashinfer", replace(GQA, kv_dtype=FP8)) == []


@pytest.mark.parametrize("name", LATENT_ONLY)
def test_fp8_pools_with_one_scale_are_served(name, monkeypatch):
    pretend(monkeypatch, GPUS[name])
    needs = replace(MLA, kv_dtype=FP8)
    assert refusals(name, needs) == []
    assert refusals(name, replace(needs, kv_scale="token")) == ["kv_scale 'token' is not 'tensor'"]


@pytest.mark.parametrize("name", LATENT_ONLY)
def test_gqa_is_refused_by_kernels_of_mla(name, monkeypatch):
    pretend(monkeypatch, GPUS[name])
    assert refusals(name, GQA) == ["GQA is not served, only MLA"]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("flashinfer", {"device": "cpu"}, "device 'cpu' is not cuda"),
        (
            "flashinfer",
            {"geometry": NARROW},
            "kv_lora_rank 64 + qk_rope_head_dim 16 is not one of 512 + 64",
        ),
        (
            "flashinfer",
            {"dtype": torch.float32, "kv_dtype": torch.float32},
            "dtype torch.float32 is not one of torch.bfloat16, torch.float16",
        ),
        (
            "flashinfer",
            {"kv_dtype": FP8},
            "KV dtype torch.float8_e4m3fn is not one of torch.bfloat16",
        ),
        ("trtllm_mla", {"page_size": 16}, "page_size 16 is not one of 32, 64"),
        (
            "trtllm_mla",
            {"geometry": NARROW},
            "kv_lora_rank 64 + qk_rope_head_dim 16 is not one of 512 + 64, 256 + 64",
        ),
        (
            "trtllm_mla",
            {"dtype": torch.float16, "kv_dtype": torch.float16},
            "dtype torch.float16 is not one of torch.bfloat16",
        ),
        ("trtllm_mla", {"max_batch_size": 8193}, "max_batch_size 8193 is above 8192"),
        (
            "trtllm_mla",
            {"kv_dtype": torch.float8_e5m2},
            "KV dtype torch.float8_e5m2 is not one of torch.bfloat16, torch.float8_e4m3fn",
        ),
        ("cutedsl_mla", {"page_size": 1}, "page_size 1 is not one of 2, 4, 8, 16, 32, 64, 128"),
        ("cutedsl_mla", {"page_size": 48}, "page_size 48 is not one of 2, 4, 8, 16, 32, 64, 128"),
        ("tokenspeed_mla", {"page_size": 128}, "page_size 128 is not one of 32, 64"),
        (
            "tokenspeed_mla",
            {"dtype": torch.float16, "kv_dtype": FP8},
            "dtype torch.float16 over an fp8 pool is not torch.bfloat16",
        ),
        (
            "aiter",
            {"geometry": NARROW},
            "kv_lora_rank 64 + qk_rope_head_dim 16 is not one of 512 + 64",
        ),
        (
            "aiter",
            {"dtype": torch.float16, "kv_dtype": torch.float16},
            "dtype torch.float16 is not one of torch.bfloat16",
        ),
    ],
)
def test_limits_are_stated(name, change, reason, monkeypatch):
    pretend(monkeypatch, GPUS[name])
    assert refusals(name, replace(MLA, **change)) == [reason]


def test_flashinfer_head_dims(monkeypatch):
    pretend(monkeypatch, HOPPER)
    needs = replace(GQA, geometry=GQAGeometry(80, 0.1))
    assert refusals("flashinfer", needs) == ["head_dim 80 is not one of 64, 128, 256"]


@pytest.mark.parametrize(
    ("name", "gpu", "reason"),
    [
        ("flashinfer", None, "no GPU is visible"),
        ("flashinfer", MI350, "GPU vendor amd is not nvidia"),
        ("trtllm_mla", HOPPER, "GPU sm90 is not one of sm100, sm103"),
        ("cutedsl_mla", Accelerator("nvidia", "sm120"), "GPU sm120 is not one of sm100, sm103"),
        ("tokenspeed_mla", HOPPER, "GPU sm90 is not one of sm100, sm103"),
        ("aiter", Accelerator("amd", "gfx942"), "GPU gfx942 is not one of gfx950"),
        ("aiter", HOPPER, "GPU vendor nvidia is not amd"),
    ],
)
def test_other_gpus_are_refused(name, gpu, reason, monkeypatch):
    pretend(monkeypatch, gpu)
    assert refusals(name, MLA) == [reason]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        (
            "flashinfer",
            {"flashinfer": None},
            "flashinfer is not installed: install flashinfer-python",
        ),
        ("flashinfer", {"flashinfer": (0, 6, 9)}, "flashinfer-python 0.6.9 is older than 0.6.13"),
        ("trtllm_mla", {"flashinfer": (0, 5)}, "flashinfer-python 0.5 is older than 0.6.13"),
        ("cutedsl_mla", {"cutlass": None}, "cutlass is not installed: install nvidia-cutlass-dsl"),
        (
            "tokenspeed_mla",
            {"tokenspeed_mla": None},
            "tokenspeed_mla is not installed: install tokenspeed-mla",
        ),
        (
            "tokenspeed_mla",
            {"cutlass": None},
            "cutlass is not installed: install nvidia-cutlass-dsl",
        ),
        ("aiter", {"aiter": None}, "aiter is not installed: install aiter from AMD"),
        ("aiter", {"triton": (3, 6)}, "triton 3.6 is older than 3.7"),
    ],
)
def test_packages_are_asked_for(name, change, reason, monkeypatch):
    packages = {key: found for key, found in {**PACKAGES, **change}.items() if found}
    pretend(monkeypatch, GPUS[name], packages)
    assert refusals(name, MLA) == [reason]


def test_fa3_is_for_hopper_and_16_bit_pools(monkeypatch):
    pretend(monkeypatch, BLACKWELL)
    assert FlashInferBackend().refusals(MLA) == []
    assert FlashInferBackend(mla="fa3").refusals(MLA) == ["fa3 kernels need a GPU of sm90"]
    pretend(monkeypatch, HOPPER)
    assert FlashInferBackend(gqa="fa3").refusals(replace(GQA, kv_dtype=FP8)) == [
        "fa3 kernels do not read an fp8 pool with 16-bit queries"
    ]


def test_all_limits_are_reported_together(monkeypatch):
    pretend(monkeypatch, HOPPER, {})
    needs = replace(MLA, page_size=16, geometry=NARROW, dtype=torch.float16, kv_dtype=FP8)
    assert len(refusals("trtllm_mla", needs)) == 5


@pytest.mark.parametrize("extend", ["triton", "torch"])
def test_extend_states_its_own_limits(extend, monkeypatch):
    packages = PACKAGES if extend == "triton" else {"flashinfer": PACKAGES["flashinfer"]}
    pretend(monkeypatch, HOPPER, packages)
    needs = replace(MLA, dtype=torch.float64, kv_dtype=torch.float64)
    without = refusals("flashinfer", needs)
    with_extend = refusals("flashinfer", replace(needs, operations=frozenset({"extend"})))
    assert with_extend[: len(without)] == without
    assert any(reason.startswith(f"extend on {extend}: dtype") for reason in with_extend)


@pytest.mark.parametrize(
    ("gpu", "changes"),
    [
        (HOPPER, {"page_size": 256}),
        (AMPERE, {"geometry": GQAGeometry(128, 0.1), "kv_dtype": torch.float8_e4m3fn}),
    ],
    ids=str,
)
def test_extend_is_not_refused_for_pools_that_it_does_not_read(gpu, changes, monkeypatch):
    """It is given rows out of their pages, with true values."""
    pretend(monkeypatch, gpu)
    needs = replace(MLA, **changes, operations=frozenset({"decode", "verify", "extend"}))
    assert refusals("flashinfer", needs) == []
    assert refusals("triton", needs) != []
    assert refusals("triton", replace(needs, operations=frozenset({"extend"}))) == []
