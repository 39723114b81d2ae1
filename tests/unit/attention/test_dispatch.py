"""Choosing an implementation, or every reason why there is none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from attention.dispatch import (
    BACKENDS,
    EXCHANGES,
    AttentionNeeds,
    UnsupportedCombination,
    choose,
    kv_bytes_per_token,
    layout_refusals,
    preferred_backends,
)
from attention.interface import GQAGeometry, MLAGeometry
from attention.kv_rows import has_row_kernels
from attention.measured_choice import PREFERENCES
from tests.unit.attention.vendor_doubles.machine import (
    ADA,
    AMPERE,
    BLACKWELL,
    HOPPER,
    MI350,
    PACKAGES,
    pretend,
)

GQA = AttentionNeeds(
    geometry=GQAGeometry(64, 0.125),
    num_q_heads=32,
    num_kv_heads=2,
    tp_size=4,
    dcp_size=2,
    page_size=16,
)
MLA = replace(GQA, geometry=MLAGeometry(512, 128, 64, 128, 0.1), num_kv_heads=1, dcp_size=4)
ON_GPU = replace(
    MLA,
    num_q_heads=128,
    tp_size=8,
    dcp_size=8,
    device="cuda",
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    operations=frozenset({"decode", "verify", "extend"}),
)


def test_auto_takes_torch_and_the_packed_all_to_all():
    choice = choose(GQA)
    assert (choice.backend.name, choice.exchange.name) == ("torch", "a2a")
    assert choice.warnings == ()


def test_each_rank_gets_a_backend_of_its_own():
    assert choose(GQA).backend is not choose(GQA).backend


@pytest.mark.parametrize("name", ["a2a", "ag_rs"])
def test_a_named_exchange_is_taken(name):
    assert choose(GQA, exchange=name).exchange.name == name


def test_names_of_the_options_are_their_keys():
    assert all(options[key]().name == key for options in (BACKENDS, EXCHANGES) for key in options)


def test_every_reason_is_reported_at_once(monkeypatch):
    pretend(monkeypatch, None, {})
    needs = replace(
        GQA,
        dcp_size=3,
        interleave=5,
        dtype=torch.float64,
        q_mode="broadcast",
        window_mask="tree",
        operations=frozenset({"decode", "beam"}),
    )
    with pytest.raises(UnsupportedCombination) as refused:
        choose(needs, exchange="nccl")
    for fragment in (
        "dcp_size 3 must divide tp_size 4",
        "interleave 5",
        "'broadcast'",
        "'tree'",
        "['beam']",
        "backend triton: device 'cpu' is not cuda",
        "backend triton: triton is not installed",
        "backend flashinfer: device 'cpu' is not cuda",
        "backend trtllm_mla: GQA is not served, only MLA",
        "backend cutedsl_mla: cutlass is not installed",
        "backend tokenspeed_mla: tokenspeed_mla is not installed",
        "backend aiter: aiter is not installed",
        "backend torch: dtype torch.float64",
        "exchange 'nccl' is not one of",
    ):
        assert any(fragment in reason for reason in refused.value.reasons), fragment
        assert fragment in str(refused.value)
    for name in BACKENDS:
        assert any(reason.startswith(f"backend {name}: ") for reason in refused.value.reasons)


def test_a_refusal_is_a_value_error():
    with pytest.raises(ValueError, match=r"backend 'flash' is not one of triton, .* or auto"):
        choose(GQA, backend="flash")


def test_a_wide_dtype_is_refused_by_the_packed_exchange_only():
    needs = replace(GQA, dtype=torch.float64)
    assert EXCHANGES["a2a"]().refusals(needs)
    assert not EXCHANGES["ag_rs"]().refusals(needs)


@pytest.mark.parametrize(
    ("gpu", "kind", "heads", "expected"),
    [
        (HOPPER, "mla", 1, "triton"),
        (HOPPER, "mla", 32, "triton"),
        (HOPPER, "mla", 63, "triton"),
        (HOPPER, "mla", 64, "flashinfer"),
        (HOPPER, "mla", 128, "flashinfer"),
        (HOPPER, "gqa", 128, "triton"),
        (BLACKWELL, "mla", 128, "triton"),
        (MI350, "mla", 128, "triton"),
    ],
)
def test_the_measured_table_decides(gpu, kind, heads, expected, monkeypatch):
    pretend(monkeypatch, gpu)
    needs = replace(ON_GPU, num_q_heads=heads)
    if kind == "gqa":
        needs = replace(needs, geometry=GQAGeometry(128, 0.1), num_kv_heads=1)
    assert choose(needs).backend.name == expected


@pytest.mark.parametrize(
    ("dcp_size", "expected"), [(1, "triton"), (2, "triton"), (8, "flashinfer")]
)
def test_the_widened_heads_decide_not_the_local_ones(dcp_size, expected, monkeypatch):
    """128 heads on 8 ranks are 16 each; a group of 8 ranks works on all 128."""
    pretend(monkeypatch, HOPPER)
    needs = replace(ON_GPU, dcp_size=dcp_size)
    assert needs.num_widened_heads == 16 * dcp_size
    assert choose(needs).backend.name == expected


@pytest.mark.parametrize(
    ("gpu", "absent", "expected"),
    [
        (HOPPER, {"flashinfer"}, "triton"),
        (HOPPER, {"flashinfer", "triton"}, "torch"),
        (BLACKWELL, {"triton"}, "cutedsl_mla"),
        (BLACKWELL, {"triton", "cutlass"}, "flashinfer"),
        (BLACKWELL, set(PACKAGES), "torch"),
        (MI350, {"aiter"}, "triton"),
    ],
)
def test_what_is_not_installed_is_skipped_in_order(gpu, absent, expected, monkeypatch):
    pretend(monkeypatch, gpu, {name: PACKAGES[name] for name in PACKAGES if name not in absent})
    assert choose(ON_GPU).backend.name == expected


def test_what_was_measured_faster_gives_way_where_it_does_not_serve(monkeypatch):
    """FlashInfer has no fp32 MLA."""
    pretend(monkeypatch, HOPPER)
    needs = replace(ON_GPU, dtype=torch.float32, kv_dtype=torch.float32)
    assert choose(needs).backend.name == "triton"
    with pytest.raises(UnsupportedCombination, match=r"dtype torch\.float32 is not one of"):
        choose(needs, backend="flashinfer")


@pytest.mark.parametrize(
    ("gpu", "kind", "expected"),
    [
        (AMPERE, "mla", "torch"),
        (AMPERE, "gqa", "flashinfer"),
        (ADA, "mla", "triton"),
        (ADA, "gqa", "triton"),
        (BLACKWELL, "mla", "triton"),
        (MI350, "mla", "triton"),
    ],
)
def test_an_fp8_pool_needs_a_gpu_for_which_triton_compiles_it(gpu, kind, expected, monkeypatch):
    pretend(monkeypatch, gpu)
    needs = replace(ON_GPU, num_q_heads=16, kv_dtype=torch.float8_e4m3fn)
    if kind == "gqa":
        needs = replace(needs, geometry=GQAGeometry(128, 0.1), num_kv_heads=2)
    assert choose(needs).backend.name == expected
    if expected != "triton":
        with pytest.raises(UnsupportedCombination, match="GPU sm80 has no instructions for") as no:
            choose(needs, backend="triton")
        assert len(no.value.reasons) == 1


@pytest.mark.parametrize(("gpu", "is_served"), [(AMPERE, False), (ADA, True), (MI350, True)])
def test_rows_of_an_fp8_pool_are_written_by_kernels_only_where_they_compile(
    gpu, is_served, monkeypatch
):
    pretend(monkeypatch, gpu)
    assert has_row_kernels(torch.float8_e4m3fn) is is_served
    assert has_row_kernels(torch.bfloat16)
    pretend(monkeypatch, gpu, {})
    assert not has_row_kernels(torch.bfloat16)


def test_captured_graphs_need_a_backend_that_can_be_captured(monkeypatch):
    pretend(monkeypatch, HOPPER)
    needs = replace(ON_GPU, cuda_graphs=True)
    assert choose(needs).backend.name == "triton"
    with pytest.raises(UnsupportedCombination, match="cannot be captured in a CUDA graph"):
        choose(needs, backend="flashinfer")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hosts": 2}, "exchange fused: the ranks of a group are on 2 hosts, not on one"),
        ({"tp_size": 16, "dcp_size": 16}, "exchange fused: dcp_size 16 is above 8"),
        ({"device": "cpu"}, "exchange fused: device 'cpu' is not an NVIDIA GPU"),
    ],
)
def test_symmetric_memory_is_for_few_gpus_of_one_host(change, reason, monkeypatch):
    pretend(monkeypatch, HOPPER)
    needs = replace(ON_GPU, **change)
    with pytest.raises(UnsupportedCombination) as refused:
        choose(needs, exchange="fused")
    assert reason in refused.value.reasons
    assert choose(needs).exchange.name == "a2a"


@pytest.mark.parametrize("gpu", [None, HOPPER, BLACKWELL, MI350])
@pytest.mark.parametrize("needs", [GQA, MLA, ON_GPU, replace(ON_GPU, num_q_heads=0)])
def test_every_backend_is_tried_once(gpu, needs, monkeypatch):
    pretend(monkeypatch, gpu)
    assert sorted(preferred_backends(needs)) == sorted(BACKENDS)


def test_every_preference_names_known_backends_and_its_source():
    for row in PREFERENCES:
        assert set(row.backends) <= set(BACKENDS)
        assert row.source


# What is asked for, and the reason that must be given: the value and what is accepted.
START_UP_RULES = {
    "dcp below 1": ({"dcp_size": 0}, "dcp_size 0 must be >= 1"),
    "tp below 1": ({"tp_size": 0, "dcp_size": 1}, "dcp_size 1 must divide tp_size 0"),
    "tp % dcp": ({"tp_size": 8, "dcp_size": 3}, "dcp_size 3 must divide tp_size 8"),
    "dcp above tp": ({"tp_size": 2, "dcp_size": 4}, "dcp_size 4 must divide tp_size 2"),
    "page below 1": ({"page_size": 0}, "page_size 0 must be >= 1"),
    "interleave below 1": (
        {"interleave": 0},
        "interleave 0 must be >= 1 and divide page_size 16",
    ),
    "page % interleave": (
        {"interleave": 3},
        "interleave 3 must be >= 1 and divide page_size 16",
    ),
    "interleave above page": (
        {"interleave": 32},
        "interleave 32 must be >= 1 and divide page_size 16",
    ),
    "no KV heads": ({"num_kv_heads": 0}, "num_kv_heads 0 is outside [1, num_q_heads 32]"),
    "more KV than query heads": (
        {"num_kv_heads": 33},
        "num_kv_heads 33 is outside [1, num_q_heads 32]",
    ),
    "MLA with KV heads": (
        {"geometry": MLA.geometry, "num_kv_heads": 2},
        "num_kv_heads 2 must be 1 for MLA",
    ),
    "head_dim": ({"geometry": GQAGeometry(0, 0.1)}, "head_dim 0 must be >= 1"),
    "latent rank": (
        {"geometry": MLAGeometry(0, 128, 64, 128, 0.1), "num_kv_heads": 1},
        "kv_lora_rank 0 must be >= 1",
    ),
    "softmax scale": (
        {"geometry": GQAGeometry(64, math.inf)},
        "softmax_scale inf must be a finite number above 0",
    ),
    "q_mode": ({"q_mode": "broadcast"}, "q_mode 'broadcast' is not one of gather, replicate"),
    "window mask": ({"window_mask": "tree"}, "window_mask 'tree' is not one of causal, full"),
    "scale of an fp8 pool": ({"kv_scale": "block"}, "kv_scale 'block' is not one of tensor, token"),
    "operations": (
        {"operations": frozenset({"decode", "draft"})},
        "operations ['draft'] are not among decode, verify, extend",
    ),
    "no operations": (
        {"operations": frozenset()},
        "operations are empty; name some of decode, verify, extend",
    ),
    "batch": ({"max_batch_size": 0}, "max_batch_size 0 must be >= 1"),
    "hosts": ({"num_hosts": 3}, "num_hosts 3 is outside [1, dcp_size 2]"),
    "graphs on CPU": ({"cuda_graphs": True}, "CUDA graphs need device 'cuda', not 'cpu'"),
}


@pytest.mark.parametrize("rule", START_UP_RULES)
def test_start_up_rules_state_the_value_and_what_is_accepted(rule):
    change, reason = START_UP_RULES[rule]
    needs = replace(GQA, **change)
    assert reason in layout_refusals(needs)
    with pytest.raises(UnsupportedCombination) as refused:
        choose(needs)
    assert reason in refused.value.reasons


@pytest.mark.parametrize(
    "change",
    [
        # Rules of others that do not bind us: uneven and missing heads, any interleave with
        # verify, replicated queries without stripes or with either exchange.
        {"num_q_heads": 9, "num_kv_heads": 3, "tp_size": 4, "dcp_size": 2},
        {"num_q_heads": 3, "num_kv_heads": 1, "tp_size": 4, "dcp_size": 4},
        {"interleave": 16, "operations": frozenset({"decode", "verify", "extend"})},
        {"q_mode": "replicate", "dcp_size": 1},
        {"q_mode": "replicate", "tp_size": 6, "dcp_size": 3},
        {"page_size": 1},
    ],
)
def test_what_others_refuse_and_we_serve(change):
    needs = replace(GQA, **change)
    assert layout_refusals(needs) == []
    for exchange in ("a2a", "ag_rs"):
        assert choose(needs, exchange=exchange).backend.name == "torch"


@pytest.mark.parametrize(
    ("tp_size", "dcp_size", "num_kv_heads", "accepted", "warned"),
    [
        (4, 2, 2, True, False),
        (4, 4, 2, True, True),
        (8, 4, 2, True, False),
        (8, 8, 2, True, True),
        (8, 8, 1, True, False),
        (16, 4, 8, True, True),
        (6, 3, 2, True, False),
        (2, 4, 2, False, False),
        (8, 3, 2, False, False),
    ],
)
def test_topology_table_bugs_19_and_20(tp_size, dcp_size, num_kv_heads, accepted, warned):
    """One validator; more ranks than KV heads make use of is a warning, not a refusal."""
    needs = replace(GQA, tp_size=tp_size, dcp_size=dcp_size, num_kv_heads=num_kv_heads)
    if accepted:
        assert bool(choose(needs).warnings) == warned
    else:
        with pytest.raises(UnsupportedCombination):
            choose(needs)


def test_the_warning_states_the_bytes_and_the_smaller_size():
    (warning,) = choose(replace(GQA, dcp_size=4)).warnings
    assert "dcp_size 4 saves no memory over 2" in warning
    assert "256 bytes per token and layer" in warning


def test_kv_bytes_per_token_and_rank():
    """GQA: max(1, Hkv*c/tp)/c of a KV head; MLA: (512 + 64)/c."""
    per_head = 2 * 64 * 4
    assert kv_bytes_per_token(replace(GQA, dcp_size=1)) == per_head
    assert kv_bytes_per_token(GQA) == per_head / 2
    assert kv_bytes_per_token(replace(GQA, dcp_size=4)) == per_head / 2
    assert kv_bytes_per_token(MLA) == 576 * 4 / 4


def test_mla_is_never_warned_about():
    assert choose(replace(MLA, tp_size=8, dcp_size=8)).warnings == ()
