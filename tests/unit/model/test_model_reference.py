"""The shipped tiny-mla model against greedy continuations made with transformers in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "assets/reference/tiny-mla-greedy.jsonl")
    .read_text()
    .splitlines()
]
# Below this gap between the best two logits, another order of summation may choose otherwise.
NEAR_TIE = 1e-3


def check(row: dict, logits: torch.Tensor) -> None:
    """logits [1 + outputs, V]: what follows the prompt and each output token."""
    best = logits[:-1].topk(2).values
    gaps = (best[:, 0] - best[:, 1]).tolist()
    assert gaps == pytest.approx(row["gaps"], abs=5e-4)
    chosen = logits[:-1].argmax(-1).tolist()
    for step, (ours, theirs) in enumerate(zip(chosen, row["output_ids"], strict=True)):
        assert ours == theirs or row["gaps"][step] < NEAR_TIE, f"step {step}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['kind']}-{row['n_prompt']}")
def test_greedy_choices_and_logit_gaps_equal_the_reference(row: dict, lab: SimpleNamespace) -> None:
    token_ids = torch.tensor(row["prompt_ids"] + row["output_ids"])
    topology = lab.Topology(2, 2) if row["n_prompt"] < 30 else lab.Topology()
    _, logits = lab.run_topology(lab.ASSETS / "tiny-mla", [token_ids], topology)
    check(row, logits[row["n_prompt"] - 1 :])


def test_token_by_token_decoding_equals_the_reference(lab: SimpleNamespace) -> None:
    row = next(row for row in ROWS if row["kind"] == "chat-simple")
    prompt, output = torch.tensor(row["prompt_ids"]), torch.tensor(row["output_ids"])
    _, logits = lab.run_topology(
        lab.ASSETS / "tiny-mla", [prompt, *output.split(1)], lab.Topology()
    )
    check(row, logits[len(prompt) - 1 :])
