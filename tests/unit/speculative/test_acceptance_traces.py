"""The trained drafters against accepted counts that an independent exact loop measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvbraid.model.loader import load_config
from kvbraid.settings import models_directory
from kvbraid.speculative.drafter import load_drafter
from kvbraid.speculative.proposer import Proposer
from kvbraid.speculative.tap_fusion import load_tap_fusion
from tests.unit.speculative.drafters.exact_loop import (
    TransformersTarget,
    Window,
    verified_windows,
)
from tools.chat_prompt import chat_prompt_ids

ASSETS = Path(__file__).parents[2] / "assets"
ROWS = [
    json.loads(line)
    for line in (ASSETS / "reference/tiny-mla-acceptance.jsonl").read_text().splitlines()
]
NEAR_TIE = 1e-3

# Too large for the source tree: trained drafters and traces for SmolLM2, beside the checkout.
SHARED = Path(__file__).parents[4] / "shared/models"
SMOLLM2 = models_directory() / "smollm2-135m-instruct"
SMOLLM2_IDS = (104, 123)
missing = [str(path) for path in (SHARED, SMOLLM2) if not path.exists()]


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    torch.set_num_threads(1)
    return TransformersTarget(ASSETS / "tiny-mla")


def check(windows: list[Window], accepted: list[int]) -> None:
    for number, (window, theirs) in enumerate(zip(windows, accepted, strict=True)):
        if window.accepted != theirs:
            assert window.gap < NEAR_TIE, f"window {number}: {window.accepted}, not {theirs}"
            return


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['kind']}-{row['id']}")
def test_tiny_mla_traces(target: TransformersTarget, row: dict, kind: str) -> None:
    path = ASSETS / "tiny-mla"
    prompt_ids = chat_prompt_ids(path, row["prompt"])
    assert len(prompt_ids) == row["n_prompt"]
    drafter = ASSETS / f"tiny-mla-{kind}"
    proposer = Proposer(load_drafter(drafter, path), num_kv_tokens=512, max_sequences=1)
    proposer.kv.pool.fill_nan()
    assert proposer.max_draft_tokens == row[kind]["draft_tokens"]
    fusion = load_tap_fusion(drafter, load_config(path))
    accepted = row[kind]["accepted"]
    check(verified_windows(target, fusion, proposer, prompt_ids, len(accepted)), accepted)


@pytest.fixture(scope="module")
def smollm2() -> TransformersTarget:
    torch.set_num_threads(1)
    return TransformersTarget(SMOLLM2, gguf_file="model.gguf")


@pytest.mark.slow
@pytest.mark.skipif(bool(missing), reason=f"missing: {', '.join(missing)}: traces NOT checked")
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_smollm2_traces(smollm2: TransformersTarget, kind: str) -> None:
    drafter = SHARED / f"smollm2-135m-{kind}"
    fusion = load_tap_fusion(drafter, load_config(SMOLLM2))
    loaded = load_drafter(drafter, SMOLLM2)
    traces = SHARED / "reference/smollm2-135m-acceptance.jsonl"
    rows = [json.loads(line) for line in traces.read_text().splitlines()]
    for row in rows:
        if row["id"] in SMOLLM2_IDS:
            prompt_ids = chat_prompt_ids(SMOLLM2, row["prompt"])
            assert len(prompt_ids) == row["n_prompt"]
            proposer = Proposer(loaded, num_kv_tokens=512, max_sequences=1)
            accepted = row[kind]["accepted"]
            windows = verified_windows(smollm2, fusion, proposer, prompt_ids, len(accepted))
            check(windows, accepted)
