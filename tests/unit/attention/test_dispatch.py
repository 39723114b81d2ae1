"""Choosing an implementation, or every reason why there is none."""

from __future__ import annotations

import importlib.util
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
)
from attention.interface import GQAGeometry, MLAGeometry

GQA = AttentionNeeds(
    geometry=GQAGeometry(64, 0.125),
    num_q_heads=32,
    num_kv_heads=2,
    tp_size=4,
    dcp_size=2,
    page_size=16,
)
MLA = replace(GQA, geometry=MLAGeometry(512, 128, 64, 128, 0.1), num_kv_heads=1, dcp_size=4)


def test_auto_takes_torch_and_the_packed_all_to_all():
    choice = choose(GQA)
    assert (choice.backend.name, choice.exchange.name) == ("torch", "a2a")
    assert choice.warnings == ()


def test_each_rank_gets_a_backend_of_its_own():
    assert choose(GQA).backend is not choose(GQA).backend


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_named_exchange_is_taken(name):
    assert choose(GQA, exchange=name).exchange.name == name


def test_names_of_the_options_are_their_keys():
    assert all(options[key]().name == key for options in (BACKENDS, EXCHANGES) for key in options)


TRITON_ABSENT = (
    [] if importlib.util.find_spec("triton") else ["backend triton: triton is not installed"]
)


def test_every_reason_is_reported_at_once():
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
        choose(needs, exchange="fused")
    expected = [
        "dcp_size 3 must divide tp_size 4",
        "interleave 5",
        "'broadcast'",
        "'tree'",
        "['beam']",
        "backend triton: device 'cpu' is not cuda",
        *(
            []
            if importlib.util.find_spec("triton")
            else ["backend triton: triton is not installed"]
        ),
        "backend triton: dtype torch.float64",
        "backend triton: KV dtype torch.float32 differs",
        "backend torch: dtype torch.float64",
        "backend torch: KV dtype torch.float32 differs",
        "exchange 'fused' is not one of a2a, ag_rs or auto",
    ]
    assert len(refused.value.reasons) == len(expected)
    for reason, fragment in zip(refused.value.reasons, expected, strict=True):
        assert fragment in reason
        assert fragment in str(refused.value)


def test_a_refusal_is_a_value_error():
    with pytest.raises(ValueError, match="backend 'flash' is not one of triton, torch or auto"):
        choose(GQA, backend="flash")


def test_a_wide_dtype_is_refused_by_the_packed_exchange_only():
    needs = replace(GQA, dtype=torch.float64)
    assert EXCHANGES["a2a"]().refusals(needs)
    assert not EXCHANGES["ag_rs"]().refusals(needs)


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
