"""Stops and limits inside a window of drafts."""

from __future__ import annotations

from kvbraid.engine.speculation import SpeculationReport
from kvbraid.request import FinishReason, SamplingParams
from kvbraid.speculative.draft_policy import StepOutcome
from kvbraid.speculative.fixed_policy import FixedPolicy
from tests.unit.engine.drafted_engine import ToyDrafter, drafted_engine, idle, right
from tools.toy_rank import expected


def test_limits_end_inside_a_window() -> None:
    engine = drafted_engine(ToyDrafter(right))
    tokens = expected([1, 2, 3], 30)
    stop = tokens[8]
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=30, stop_token_ids=(stop,))
    engine.submit("stop", [1, 2, 3], sampling=sampling)
    engine.submit("length", [1, 2, 3], max_tokens=7)
    engine.run(idle())
    assert engine.tokens("stop") == tokens[: tokens.index(stop) + 1]
    assert engine.chunks("stop")[-1].chunk.finish_reason is FinishReason.STOP
    assert engine.tokens("length") == tokens[:7]
    assert engine.chunks("length")[-1].chunk.finish_reason is FinishReason.LENGTH


def test_drafts_behind_an_accepted_stop_are_not_held_against_the_drafter() -> None:
    outcomes: list[StepOutcome] = []

    class Recording(FixedPolicy):
        def record(self, outcome: StepOutcome) -> None:
            outcomes.append(outcome)

    tokens = expected([1, 2, 3], 30)

    def right_up_to_the_stop(known: list[int], num_wanted: int) -> list[int]:
        return [t if t != tokens[9] else 999 for t in right(known, num_wanted)]

    drafter = ToyDrafter(right_up_to_the_stop)
    engine = drafted_engine(drafter, policy=Recording(drafter.max_draft_tokens))
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=30, stop_token_ids=(tokens[8],))
    engine.submit("a", [1, 2, 3], sampling=sampling)
    engine.run(idle())
    assert engine.tokens("a") == tokens[:9]
    assert [list(o.num_verified) for o in outcomes] == [[4], [3]]
    assert [list(o.num_accepted) for o in outcomes] == [[4], [3]]


def test_accepted_drafts_behind_a_stop_are_counted_nowhere() -> None:
    outcomes: list[StepOutcome] = []
    reports: list[SpeculationReport] = []

    class Recording(FixedPolicy):
        def record(self, outcome: StepOutcome) -> None:
            outcomes.append(outcome)

    drafter, tokens = ToyDrafter(right), expected([1, 2, 3], 30)
    engine = drafted_engine(drafter, reports.append, Recording(drafter.max_draft_tokens))
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=30, stop_token_ids=(tokens[7],))
    engine.submit("a", [1, 2, 3], sampling=sampling)
    engine.run(idle())
    assert engine.tokens("a") == tokens[:8]
    # Of four right drafts the second ends the sequence.
    assert [e.chunk.num_accepted for e in engine.chunks("a")] == [0, 4, 2]
    assert [list(o.num_accepted) for o in outcomes] == [[4], [2]]
    assert [list(o.num_verified) for o in outcomes] == [[4], [2]]
    assert [r.windows for r in reports] == [[(4, 4, 4)], [(4, 4, 2)]]


def test_context_limit_ends_inside_a_window() -> None:
    engine = drafted_engine(ToyDrafter(right), max_model_len=17)
    engine.submit("a", [1, 2, 3], max_tokens=100)
    engine.run(idle())
    assert engine.tokens("a") == expected([1, 2, 3], 14)
