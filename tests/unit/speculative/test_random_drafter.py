"""The drafter that benchmarks oppose speculation with: whole, and of no use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.random_drafter import write_random_drafter
from kvbraid.model.loader import load_config
from kvbraid.speculative.drafter import load_drafter
from kvbraid.speculative.drafter_source import open_drafter
from kvbraid.speculative.proposal import DraftTask, Proposal
from kvbraid.speculative.proposer import Proposer

ASSETS = Path(__file__).parents[2] / "assets"
TARGET = ASSETS / "tiny-mla"


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_it_loads_as_the_trained_one_and_drafts_something_else(kind: str, tmp_path: Path) -> None:
    trained = ASSETS / f"tiny-mla-{kind}"
    random = write_random_drafter(trained, tmp_path / "random")
    target = load_config(TARGET)
    config = open_drafter(random, target).config
    assert config == open_drafter(trained, target).config
    rows = torch.randn(12, config.fused_width, generator=torch.Generator().manual_seed(1))
    task = DraftTask("a", 0, rows, tuple(range(100, 112)), 111, config.max_draft_tokens)
    drafts = []
    for path in (trained, random):
        proposer = Proposer(load_drafter(path, TARGET), num_kv_tokens=64, max_sequences=1)
        (proposal,) = proposer.step([task])
        assert isinstance(proposal, Proposal)
        assert len(proposal.token_ids) == config.max_draft_tokens
        drafts.append(proposal.token_ids)
    assert drafts[0] != drafts[1]


def test_a_seed_makes_the_same_weights(tmp_path: Path) -> None:
    files = [
        write_random_drafter(ASSETS / "tiny-mla-eagle3", tmp_path / name, seed=seed)
        / "model.safetensors"
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    same, again, other = (path.read_bytes() for path in files)
    assert same == again != other
