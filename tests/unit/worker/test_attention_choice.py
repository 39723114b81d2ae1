"""Whether a worker's decode is captured in graphs, and every reason where it cannot be."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attention.backends.trtllm_mla import TrtllmMlaBackend
from attention.dispatch import AttentionNeeds
from attention.interface import MLAGeometry
from attention.layout import HeadLayout, StripeLayout
from kvbraid.engine.captured_forward import DecodeLimits
from kvbraid.errors import ConfigError
from kvbraid.model.loader import load_config
from kvbraid.settings import ParallelSettings
from kvbraid.worker.attention_choice import (
    attention_needs,
    capture_obstacles,
    choose_attention,
)
from tests.unit.attention.vendor_doubles.machine import BLACKWELL, HOPPER, pretend

EXPERTS = load_config(str(Path(__file__).parents[2] / "assets" / "tiny-mla"))
DENSE = replace(EXPERTS, moe=None)
NEEDS = AttentionNeeds(
    geometry=MLAGeometry(512, 128, 64, 128, 0.1),
    num_q_heads=128,
    num_kv_heads=1,
    page_size=64,
    device="cuda",
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    operations=frozenset({"decode", "verify", "extend"}),
)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)


@pytest.mark.parametrize(
    ("max_num_seqs", "reasons"),
    [(8192, []), (8193, ["max_batch_size 8193 is above 8192"])],
)
def test_kernels_are_asked_for_sequences_however_wide_their_windows(
    max_num_seqs: int, reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, BLACKWELL)
    latent = replace(EXPERTS.mla, kv_lora_rank=512, qk_rope_head_dim=64)
    needs = attention_needs(
        replace(EXPERTS, mla=latent),
        ParallelSettings(),
        HeadLayout(EXPERTS.num_q_heads, 1, 1, 0, 1),
        StripeLayout(1, 0, 64),
        DecodeLimits(max_num_seqs, max_window=4, max_model_len=64, dtype=torch.bfloat16),
        torch.device("cuda"),
        num_hosts=1,
    )
    assert TrtllmMlaBackend().refusals(needs) == reasons


@pytest.mark.parametrize("wanted", ["auto", "always"])
def test_graphs_are_taken_where_nothing_stands_against_them(wanted: str) -> None:
    """Also where the backend that is fastest eagerly cannot be captured."""
    choice, is_captured = choose_attention(NEEDS, ParallelSettings(cuda_graphs=wanted), [])
    assert (choice.backend.name, is_captured) == ("triton", True)


def test_never_is_never() -> None:
    choice, is_captured = choose_attention(NEEDS, ParallelSettings(cuda_graphs="never"), [])
    assert (choice.backend.name, is_captured) == ("flashinfer", False)


def test_cpus_have_no_graphs_and_no_reason_to_complain(caplog: pytest.LogCaptureFixture) -> None:
    needs = replace(NEEDS, device="cpu")
    choice, is_captured = choose_attention(needs, ParallelSettings(), ["not looked at"])
    assert (choice.backend.name, is_captured) == ("torch", False)
    assert not caplog.records
    with pytest.raises(ConfigError, match="CUDA graphs need device 'cuda', not 'cpu'"):
        choose_attention(needs, ParallelSettings(cuda_graphs="always"), [])


def test_always_refuses_with_every_reason() -> None:
    parallel = ParallelSettings(cuda_graphs="always", attention_backend="flashinfer")
    with pytest.raises(ConfigError) as refused:
        choose_attention(NEEDS, parallel, ["this", "that"])
    message = str(refused.value)
    assert message.startswith("cuda_graphs is always, but decode cannot be captured: this; that; ")
    assert "backend flashinfer: its decode cannot be captured in a CUDA graph" in message
    assert message.endswith("accepted here: auto, never")


def test_auto_decodes_eagerly_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    parallel = ParallelSettings(attention_backend="flashinfer")
    with caplog.at_level(logging.WARNING):
        choice, is_captured = choose_attention(NEEDS, parallel, ["this"])
    assert (choice.backend.name, is_captured) == ("flashinfer", False)
    (record,) = caplog.records
    assert "decode runs without CUDA graphs: this; " in record.getMessage()
    assert "flashinfer: its decode cannot be captured" in record.getMessage()


@pytest.mark.parametrize("wanted", ["auto", "always", "never"])
def test_attention_that_nothing_serves_is_refused_anyway(wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"dtype torch\.float64 is not one of"):
        choose_attention(
            replace(NEEDS, dtype=torch.float64), ParallelSettings(cuda_graphs=wanted), []
        )


@pytest.mark.parametrize(
    ("config", "communicator", "tp_size", "has_triton", "reasons"),
    [
        (EXPERTS, "nccl", 4, True, []),
        (EXPERTS, "shared_memory", 1, True, []),
        (DENSE, "nccl", 1, False, []),
        (DENSE, "gloo", 2, True, ["communicator 'gloo' waits on the host"]),
        (EXPERTS, "gloo", 2, False, ["communicator 'gloo'", "without triton, layers with experts"]),
    ],
)
def test_obstacles_outside_of_the_attention(
    config: SimpleNamespace,
    communicator: str,
    tp_size: int,
    has_triton: bool,
    reasons: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_triton else None)
    found = capture_obstacles(config, communicator, tp_size)
    assert len(found) == len(reasons)
    assert all(ours.startswith(start) for ours, start in zip(found, reasons, strict=True))
