"""Whether a drafter's steps are captured in graphs, and what is said where they cannot be."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch

from kvbraid.errors import ConfigError
from kvbraid.speculative.draft_graphs import DraftGraphs
from kvbraid.speculative.drafter import Drafter
from kvbraid.speculative.proposer import Proposer
from kvbraid.worker import proposer_assembly
from kvbraid.worker.proposer_assembly import build_proposer
from tests.unit.speculative.drafters.random_drafters import eagle3_config, random_drafter

Wanted = Literal["auto", "always", "never"]


class Recorder:
    """Stands for Proposer: refuses graphs where `obstacle` says why."""

    obstacle = ""

    def __init__(self, drafter: Drafter, *, graphs: DraftGraphs | None = None, **sizes: int):
        if graphs is not None and self.obstacle:
            raise ConfigError(self.obstacle)
        self.graphs, self.sizes = graphs, sizes


def build(wanted: Wanted, device: str) -> Any:
    drafter = cast(Drafter, SimpleNamespace(device=torch.device(device)))
    return build_proposer(
        drafter, cuda_graphs=wanted, num_kv_tokens=640, max_sequences=4, max_len=77
    )


@pytest.mark.parametrize(
    ("wanted", "device", "is_captured"),
    [
        ("auto", "cuda", True),
        ("always", "cuda", True),
        ("never", "cuda", False),
        ("auto", "cpu", False),
    ],
)
def test_graphs_are_taken_on_gpus(
    wanted: Wanted, device: str, is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposer_assembly, "Proposer", Recorder)
    built = build(wanted, device)
    assert built.sizes == {"num_kv_tokens": 640, "max_sequences": 4}
    assert (built.graphs is not None) == is_captured
    assert not is_captured or built.graphs.max_len == 77


def test_auto_goes_on_without_graphs_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(proposer_assembly, "Proposer", Recorder)
    monkeypatch.setattr(Recorder, "obstacle", "no backend can be captured")
    with caplog.at_level(logging.WARNING):
        assert build("auto", "cuda").graphs is None
    assert caplog.messages == ["drafts run without CUDA graphs: no backend can be captured"]


def test_always_on_a_cpu_is_refused_with_the_reason() -> None:
    drafter = random_drafter(eagle3_config()).load()
    message = "cuda_graphs is always, .* CUDA graphs need device 'cuda', not 'cpu'.*: auto, never"
    with pytest.raises(ConfigError, match=message):
        build_proposer(drafter, cuda_graphs="always", num_kv_tokens=64, max_sequences=2, max_len=64)


@pytest.mark.parametrize("wanted", ["auto", "never"])
def test_a_proposer_on_a_cpu_drafts(wanted: Wanted) -> None:
    drafter = random_drafter(eagle3_config()).load()
    built = build_proposer(
        drafter, cuda_graphs=wanted, num_kv_tokens=64, max_sequences=2, max_len=64
    )
    assert isinstance(built, Proposer)
