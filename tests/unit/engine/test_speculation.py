"""Drafts never change what is emitted, whatever they are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbraid.engine.speculation import SpeculationReport
from kvbraid.engine.verification import emitted_rows
from kvbraid.request import SamplingParams
from kvbraid.speculative.proposal import Answer, DraftTask, Resync
from tests.unit.engine.drafted_engine import (
    VOCAB,
    ToyDrafter,
    drafted_engine,
    idle,
    mixed,
    right,
    wrong,
)
from tools.toy_rank import expected


def test_right_drafts_come_five_at_a_time_and_wrong_ones_one_by_one() -> None:
    for guess, most in ((right, 5), (wrong, 1)):
        engine = drafted_engine(ToyDrafter(guess))
        engine.submit("a", [1, 2, 3], max_tokens=21)
        engine.run(idle())
        assert engine.tokens("a") == expected([1, 2, 3], 21)
        assert max(len(e.chunk.token_ids) for e in engine.chunks("a")) == most


def test_a_client_turns_drafts_off_or_down() -> None:
    drafter = ToyDrafter(right)
    engine = drafted_engine(drafter)
    for name, limit in (("off", 0), ("two", 2)):
        sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=20, max_draft_tokens=limit)
        engine.submit(name, [ord(name[0])], sampling=sampling)
    engine.run(idle())
    longest = {n: max(len(e.chunk.token_ids) for e in engine.chunks(n)) for n in ("off", "two")}
    assert longest == {"off": 1, "two": 3}
    assert all(task.key.startswith("two") for task in drafter.tasks)


@pytest.mark.parametrize("bad", [(-1,), (VOCAB,), (5,) * 50, (2**40,)])
def test_ids_that_are_none_never_reach_the_model(bad: tuple[int, ...]) -> None:
    """vLLM #36906: a drafter's placeholder fed to the embedding."""
    reports: list[SpeculationReport] = []
    engine = drafted_engine(ToyDrafter(lambda tokens, n: bad), reports.append)
    engine.submit("a", [1, 2, 3], max_tokens=9)
    engine.run(idle())
    assert engine.tokens("a") == expected([1, 2, 3], 9)
    planned = [t for plan in engine.plans for d in plan.decodes for t in d.drafts]
    assert all(0 <= t < VOCAB for t in planned)
    assert sum(r.plain["bad_ids"] for r in reports) > 0


def test_no_answer_and_a_lost_drafter_cost_drafts_only() -> None:
    """Rows whose step was not answered are sent again; a drafter that forgot gets all of them."""
    drafter = ToyDrafter(right)

    def forget(task: DraftTask) -> Answer:
        drafter.known.clear()
        return Resync(0)

    drafter.answers = {2: lambda task: None, 4: forget}
    engine = drafted_engine(drafter)
    engine.submit("a", [1, 2, 3], max_tokens=40)
    engine.run(idle())
    assert engine.tokens("a") == expected([1, 2, 3], 40)
    assert drafter.tasks[2].first_position == drafter.tasks[1].first_position
    assert drafter.tasks[4].first_position == 0
    assert max(len(e.chunk.token_ids) for e in engine.chunks("a")[5:]) == 5


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    num_pages=st.integers(13, 40),
)
def test_any_drafts_in_any_pool_give_the_models_tokens(
    seed: int, lengths: list[int], num_pages: int
) -> None:
    """Preemption, prefix hits and windows that find no pages included."""
    engine = drafted_engine(ToyDrafter(mixed(seed)), num_pages=num_pages, max_num_batched_tokens=24)
    prompts = {f"{i}": [i % 3] * length for i, length in enumerate(lengths)}
    for name, prompt in prompts.items():
        engine.submit(name, prompt, max_tokens=8)
    engine.run(idle())
    for name, prompt in prompts.items():
        assert engine.tokens(name) == expected(prompt, 8)
    for plan in engine.plans:
        window = 1 + max((len(d.drafts) for d in plan.decodes), default=0)
        assert window <= 5
        assert sum(1 + len(d.drafts) for d in plan.decodes) <= 24


@pytest.mark.parametrize(
    ("drafts", "samples", "is_valid", "num_emitted"),
    [
        ((), [7], [True], 1),
        ((), [7], [False], 0),
        ((7, 8), [7, 8, 9], [True] * 3, 3),
        ((7, 5), [7, 8, 9], [True] * 3, 2),
        ((5, 8), [7, 8, 9], [True] * 3, 1),
        ((7, 8), [7, 8, 9], [True, False, True], 1),
        ((5, 8), [7, 8, 9], [True, False, False], 1),
        ((7, 8), [7, 8, 9], [True, True, False], 2),
    ],
)
def test_emitted_rows(
    drafts: tuple[int, ...], samples: list[int], is_valid: list[bool], num_emitted: int
) -> None:
    assert emitted_rows(drafts, samples, is_valid) == num_emitted
