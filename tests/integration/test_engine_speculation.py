"""Speculation at the engine seam: the same tokens as without, the accepted counts of the reference.

Real rank processes and the trained drafters of tiny-mla; float32, so equal means equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbraid.request import SamplingParams
from tools.chat_prompt import chat_prompt_ids
from tools.engine_case import Case, Outcome, Prompt
from tools.engine_world import EngineWorld

ASSETS = Path(__file__).parents[1] / "assets"
MODEL = ASSETS / "tiny-mla"
KINDS = ("eagle3", "dspark")
TOPOLOGIES = ((1, 1), (2, 2), (3, 3), (4, 4))


def reference(name: str) -> list[dict[str, Any]]:
    lines = (ASSETS / "reference" / f"tiny-mla-{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def drafting(kind: str, **options: Any) -> Case:
    return replace(Case(), drafter=str(ASSETS / f"tiny-mla-{kind}"), **options)


def mixed_batch() -> list[Prompt]:
    """Greedy and sampled, with everything that changes logits row by row."""
    rows = [row for row in reference("greedy") if len(row["prompt_ids"]) < 200][:8]
    samplings = (
        SamplingParams(temperature=0.0, seed=0),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.8, seed=2, top_k=20, top_p=0.9),
        SamplingParams(temperature=1.2, seed=3, min_p=0.05),
        SamplingParams(temperature=0.0, seed=4, frequency_penalty=2.0, presence_penalty=1.0),
        SamplingParams(temperature=0.7, seed=5, repetition_penalty=1.4),
        SamplingParams(temperature=0.0, seed=6, logit_bias={5: 4.0, 17: -3.0}),
        SamplingParams(temperature=0.9, seed=7, stop_token_ids=(2, 9, 11), min_tokens=12),
    )
    return [
        Prompt(tuple(row["prompt_ids"]), max_tokens=24, sampling=sampling)
        for row, sampling in zip(rows, samplings, strict=True)
    ]


def num_accepted(outcome: Outcome) -> int:
    return sum(window.num_accepted for step in outcome.windows for window in step)


@pytest.fixture(scope="module", params=TOPOLOGIES, ids=str)
def world(request: pytest.FixtureRequest) -> Iterator[EngineWorld]:
    tp_size, dcp_size = request.param
    with EngineWorld(str(MODEL), tp_size=tp_size, dcp_size=dcp_size) as running:
        yield running


@pytest.fixture(scope="module")
def plain(world: EngineWorld) -> list[list[int]]:
    return world.run(Case(), [mixed_batch()]).tokens[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_draft_tokens": 1},
        {"max_draft_tokens": 3, "page_size": 1},
        {"draft_policy": "adaptive", "batched_tokens": 64, "chunk_tokens": 16},
    ],
    ids=str,
)
def test_tokens_are_those_of_plain_decoding(
    world: EngineWorld, plain: list[list[int]], kind: str, options: dict[str, Any]
) -> None:
    """TensorRT-LLM #17701, sglang #33643: penalties of drafted rows; vLLM #6038: the seed."""
    outcome = world.run(drafting(kind, **options), [mixed_batch()])
    assert outcome.tokens[0] == plain
    if options.get("draft_policy") != "adaptive":
        assert num_accepted(outcome) > 40


@pytest.mark.parametrize("kind", KINDS)
def test_ratio_test_changes_no_greedy_token_and_is_a_function_of_the_seed(
    world: EngineWorld, plain: list[list[int]], kind: str
) -> None:
    case = drafting(kind, draft_verification="ratio_test", page_size=4)
    outcomes = [world.run(case, [mixed_batch()]) for _ in range(2)]
    tokens = outcomes[0].tokens[0]
    assert tokens == outcomes[1].tokens[0]
    is_greedy = [prompt.sampling.is_greedy for prompt in mixed_batch()]
    assert [t for t, greedy in zip(tokens, is_greedy, strict=True) if greedy] == [
        t for t, greedy in zip(plain, is_greedy, strict=True) if greedy
    ]
    adaptive = world.run(replace(case, draft_policy="adaptive"), [mixed_batch()]).tokens[0]
    assert [t for t, greedy in zip(adaptive, is_greedy, strict=True) if greedy] == [
        t for t, greedy in zip(plain, is_greedy, strict=True) if greedy
    ]
    assert tokens != plain, "every sampled sequence was drawn by exact match"
    assert num_accepted(outcomes[0]) > 40


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_sequences_keep_their_tokens(
    world: EngineWorld, plain: list[list[int]], kind: str
) -> None:
    batch = mixed_batch()
    lengths = [len(prompt.token_ids) for prompt in batch]
    # All prompts fit at once, their outputs do not.
    case = drafting(
        kind, page_size=1, kv_cache_tokens=sum(lengths) + 40, max_model_len=sum(lengths)
    )
    outcome = world.run(case, [batch])
    assert outcome.tokens[0] == plain
    assert outcome.num_preemptions > 0
    assert num_accepted(outcome) > 40


@pytest.mark.parametrize("kind", KINDS)
def test_accepted_counts_are_the_reference_loops(world: EngineWorld, kind: str) -> None:
    """Every window with all its drafts, from the first step to the last; again where the prompt
    comes from the prefix cache (vLLM #47930)."""
    for row in reference("acceptance")[:3]:
        prompt = tuple(chat_prompt_ids(MODEL, row["prompt"]))
        assert len(prompt) == row["n_prompt"]
        asked = Prompt(prompt, max_tokens=row["n_output"])
        outcome = world.run(drafting(kind, page_size=4), [[asked], [asked]])
        assert outcome.tokens[0] == outcome.tokens[1]
        counts = [step[0].num_accepted for step in outcome.windows if is_full(step, row[kind])]
        expected = row[kind]["accepted"]
        # The reference goes on to a full window where max_tokens cuts ours.
        cut = len(counts) // 2
        assert counts[:cut] == counts[cut:]
        assert counts[:cut] == expected[:cut]
        assert cut >= len(expected) - 1


def is_full(step: list[Any], reference_row: dict[str, Any]) -> bool:
    return bool(step) and step[0].num_verified == reference_row["draft_tokens"]


def test_a_window_is_verified_from_every_rank_of_a_stripe(world: EngineWorld) -> None:
    """Prompts of every length around the stripe: the window begins at each rank in turn."""
    row = next(row for row in reference("greedy") if len(row["prompt_ids"]) > 9)
    prompts = [Prompt(tuple(row["prompt_ids"][:n]), max_tokens=12) for n in range(1, 10)]
    expected = world.run(Case(page_size=2), [prompts])
    drafted = world.run(drafting("dspark", page_size=2), [prompts])
    assert drafted.tokens == expected.tokens
