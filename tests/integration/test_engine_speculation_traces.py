"""Accepted counts of the engine against the reference loop's, far into a sequence and after a loss.

Real rank processes; one draft a window in the long trace, so that 1000 windows fit into the
context.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbraid.model.loader import load_config
from kvbraid.speculative.drafter import load_drafter
from kvbraid.speculative.proposer import Proposer
from kvbraid.speculative.tap_fusion import load_tap_fusion
from tests.unit.speculative.drafters.exact_loop import TransformersTarget, verified_windows
from tools.chat_prompt import chat_prompt_ids
from tools.engine_case import Case, Prompt
from tools.engine_world import EngineWorld

ASSETS = Path(__file__).parents[1] / "assets"
MODEL = ASSETS / "tiny-mla"
LONG: dict[str, Any] = json.loads(
    (ASSETS / "reference" / "tiny-mla-long-acceptance.jsonl").read_text()
)
NUM_WINDOWS = 1000
FORGETS_AT = 6
SLOW = pytest.mark.slow


def drafting(kind: str, **options: Any) -> Case:
    return replace(Case(), drafter=str(ASSETS / f"tiny-mla-{kind}"), **options)


def long_prompt() -> list[int]:
    prompt = chat_prompt_ids(MODEL, LONG["prompt"])
    assert len(prompt) == LONG["n_prompt"]
    return prompt


def long_counts(kind: str) -> list[int]:
    return [int(digit) for digit in LONG[kind]]


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (1, "dspark"),
        (2, "eagle3"),
        pytest.param(1, "eagle3", marks=SLOW),
        pytest.param(2, "dspark", marks=SLOW),
        pytest.param(4, "dspark", marks=SLOW),
        pytest.param(4, "eagle3", marks=SLOW),
    ],
)
def test_windows_1_to_1000_are_the_reference_loops(size: int, kind: str) -> None:
    expected = long_counts(kind)[:NUM_WINDOWS]
    asked = Prompt(tuple(long_prompt()), max_tokens=2 + sum(expected) + len(expected))
    case = drafting(kind, max_draft_tokens=LONG["num_drafts"], page_size=4)
    with EngineWorld(str(MODEL), tp_size=size, dcp_size=size) as world:
        outcome = world.run(case, [[asked]])
    counts = [step[0].num_accepted for step in outcome.windows if step]
    assert counts[:NUM_WINDOWS] == expected
    assert 0 < sum(expected[-50:]) < 50, "the end of the trace says nothing"


@SLOW
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_the_long_trace_is_the_exact_loops(kind: str) -> None:
    proposer, fusion = reference_drafter(kind)
    target = TransformersTarget(MODEL)
    windows = verified_windows(
        target, fusion, proposer, long_prompt(), len(LONG[kind]), LONG["num_drafts"]
    )
    assert [window.accepted for window in windows] == long_counts(kind)
    assert min(window.gap for window in windows) > 1e-3


def reference_drafter(kind: str) -> tuple[Proposer, Any]:
    path = ASSETS / f"tiny-mla-{kind}"
    proposer = Proposer(load_drafter(path, MODEL), num_kv_tokens=4096, max_sequences=1)
    return proposer, load_tap_fusion(path, load_config(MODEL))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_drafter_that_lost_everything_gets_it_again_and_goes_on_as_before(size: int) -> None:
    """Its rows are sent anew from the first one on, prompt included: the step after has the
    counts that the reference loop has from there."""
    target, prompt = TransformersTarget(MODEL), long_prompt()
    with EngineWorld(str(MODEL), tp_size=size, dcp_size=size) as world:
        for kind in ("eagle3", "dspark"):
            case = drafting(kind, drafter_forgets_at=FORGETS_AT, page_size=4)
            outcome = world.run(case, [[Prompt(tuple(prompt), max_tokens=120)]])
            counts = [step[0].num_accepted for step in outcome.windows if step]
            before = counts[: FORGETS_AT - 1]
            # The first token is the prompt's own; the step that was told of the loss has no draft.
            num_tokens = 1 + sum(before) + len(before) + 1
            tokens = outcome.tokens[0][0]
            proposer, fusion = reference_drafter(kind)
            again = [*prompt, *tokens[: num_tokens - 1]]
            expected = verified_windows(target, fusion, proposer, again, 5)
            assert counts[FORGETS_AT - 1 :][:5] == [window.accepted for window in expected]
            first = verified_windows(
                target, fusion, reference_drafter(kind)[0], prompt, len(before)
            )
            assert before == [window.accepted for window in first]
