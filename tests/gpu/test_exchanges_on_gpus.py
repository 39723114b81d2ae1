"""The exchanges between two GPUs. The cases run in exchange_ranks, two processes for all."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.exchange_ranks import CASES, all_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(480),
]

ROOT = Path(__file__).parents[2]
LAYER_LIMIT = 5e-3
# Above the noise of the order of sums, relative to which float32 results are compared.
FLOAT32_NOISE = 5e-7


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What each case printed; the last line of a case that broke on some rank."""
    program = Path(__file__).with_name("exchange_ranks.py")
    printed = tmp_path_factory.mktemp("exchange") / "printed.jsonl"
    # What was printed before a hang still counts.
    with printed.open("w") as output, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, str(program)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=output,
            timeout=450,
            check=False,
        )
    found: dict[str, dict] = {}
    for text in printed.read_text().splitlines():
        if text.startswith("{"):
            line = json.loads(text)
            if line["error"] is not None or line["case"] not in found:
                found[line["case"]] = line
    return found


def errors_of(outcomes: dict[str, dict], case: str) -> dict[str, float]:
    assert case in outcomes, "the ranks ended before this case: see what hung or broke before it"
    assert outcomes[case]["error"] is None, outcomes[case]["error"]
    return outcomes[case]["errors"]


@pytest.mark.parametrize("way", ["eager", "graph"])
@pytest.mark.parametrize("name", CASES)
def test_errors_are_those_of_ag_rs(outcomes: dict[str, dict], way: str, name: str) -> None:
    """Against float64, over steps of changing batch and lengths."""
    errors = errors_of(outcomes, f"{way}: {name}")
    limit = max(1.25 * errors["ag_rs"], FLOAT32_NOISE)
    assert errors["ag_rs"] <= 1e-2
    assert {key: value for key, value in errors.items() if value > limit} == {}


def test_a_rank_that_is_slow_is_waited_for_and_not_overwritten(outcomes: dict[str, dict]) -> None:
    assert errors_of(outcomes, "unequal speed")["fused"] <= 1e-2


@pytest.mark.parametrize("case", [name for name in all_cases() if name.startswith("layer")])
def test_a_layer_on_two_ranks_equals_the_layer_on_one(outcomes: dict[str, dict], case: str) -> None:
    assert errors_of(outcomes, case)["layer"] <= LAYER_LIMIT


def test_too_many_tokens_are_refused_when_planned(outcomes: dict[str, dict]) -> None:
    assert errors_of(outcomes, "limits") == {}
