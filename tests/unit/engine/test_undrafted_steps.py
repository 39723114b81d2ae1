"""What a worker with a drafter pays where nothing is drafted: bookkeeping on the host, no more."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq

import pytest
import torch

from kvbraid.engine.draft_drawing import CoupledDrawing
from kvbraid.engine.drafted_decoding import DraftedDecoding
from kvbraid.engine.sequence import Source
from kvbraid.engine.speculation import SpeculationReport
from kvbraid.speculative.break_even import PlainReason
from kvbraid.speculative.draft_plan import DraftPlan
from kvbraid.speculative.draft_policy import DraftPolicy
from kvbraid.speculative.fixed_policy import FixedPolicy
from kvbraid.speculative.fused_rows import FusedRows
from kvbraid.speculative.proposal import Answer, DraftTask
from kvbraid.speculative.verify_budget import best_width
from kvbraid.transport.draft_grant import DraftGrant
from tests.unit.engine.drafted_engine import (
    NUM_SLOTS,
    VOCAB,
    RowKeeper,
    ToyDrafter,
    drafted_engine,
    idle,
    wrong,
)
from tools.scripted_engine import Script, ScriptedEngine, key_of
from tools.toy_rank import PAGE, expected

NUM_SEQUENCES = 6


class DearDrafter:
    """Must not be asked."""

    max_draft_tokens = 4

    def __init__(self) -> None:
        self.tasks: list[DraftTask] = []
        self.awaited: list[str] = []
        self.granted: list[str] = []

    def open_grant(self, key: str, end_position: int) -> DraftGrant:
        self.granted.append(key)
        return DraftGrant("nowhere:1", b"0" * 16, 1, key, "float32", 16)

    def take_rows(self) -> None:
        pass

    def await_rows(self, keys: Seq[str]) -> Collection[str]:
        self.awaited += keys
        return ()

    def step(self, tasks: Seq[DraftTask]) -> list[Answer | None]:
        self.tasks += tasks
        return [None] * len(tasks)

    def drop(self, key: str) -> None:
        pass


def losing_policy() -> DraftPolicy:
    """It knows that drafting takes twenty plain steps."""
    policy = DraftPolicy(4, width_rule=best_width, drafts_in_blocks=True)
    for size in range(1, NUM_SEQUENCES + 1):
        for _ in range(4):
            policy.costs.observe_step(size, 5, 1.0, has_prompt_rows=False)
            policy.costs.draft.observe(size, 4, 20.0)
        for _ in range(40):
            policy.costs.observe_step(size, 1, 1.0, has_prompt_rows=False)
    return policy


def losing_engine(
    drafter: DearDrafter,
    on_report: Callable[[SpeculationReport], None] = lambda report: None,
) -> ScriptedEngine:
    rows = FusedRows(1, num_slots=NUM_SLOTS, logical_page_size=PAGE, dtype=torch.float32)
    speculation = DraftedDecoding(
        drafter, rows, losing_policy(), CoupledDrawing(), logical_page_size=PAGE,
        max_model_len=250, vocab_size=VOCAB, on_report=on_report,
    )  # fmt: skip
    engine = ScriptedEngine(speculation=speculation, max_num_seqs=NUM_SEQUENCES + 1)
    RowKeeper(engine, rows)
    return engine


def test_a_losing_drafter_is_neither_asked_nor_fed_nor_waited_for() -> None:
    drafter = DearDrafter()
    engine = losing_engine(drafter)
    prompts = {f"s{i}": [i + 1, 2, 3] for i in range(NUM_SEQUENCES)}

    def script() -> Script:
        for name, prompt in prompts.items():
            engine.submit(name, prompt, max_tokens=40)
        yield

    engine.run(script())
    for name, prompt in prompts.items():
        assert engine.tokens(name) == expected(prompt, 40)
    assert (drafter.tasks, drafter.awaited) == ([], [])


def test_rows_that_come_for_sequences_that_do_not_draft_meet_no_drafter() -> None:
    drafter = DearDrafter()
    engine = losing_engine(drafter)
    speculation = engine.engine._speculation
    assert isinstance(speculation, DraftedDecoding)

    def script() -> Script:
        engine.submit("a", [1, 2, 3], max_tokens=5)
        engine.submit("b", [1, 2, 3, 4], max_tokens=50, source=Source.HANDOFF)
        yield from engine.until(lambda: engine.is_granted("b"))
        speculation.keep_rows("b/0/0", 0, torch.ones(4, 1))
        engine.complete_arrival("b")
        engine.engine.abort(key_of("b"), lambda found: None)
        yield

    engine.run(script())
    assert (drafter.granted, drafter.tasks) == (["b/0/0"], [])


class WaitingPolicy(FixedPolicy):
    """Off until a probe, of which it knows when."""

    def __init__(self, steps_to_probe: int) -> None:
        super().__init__(4)
        self._steps_to_probe = steps_to_probe

    def steps_to_drafts(self, num_sequences: int) -> int:
        return self._steps_to_probe

    def plan(self, slots: Seq[int], limits: Seq[int]) -> DraftPlan:
        return DraftPlan((0,) * len(slots), 1, reason=PlainReason.BELOW_BREAK_EVEN)


@pytest.mark.parametrize(
    ("steps_to_probe", "max_tokens", "num_taken"),
    [(20, 30, 4), (20, 10, 0), (64, 200, 4), (65, 200, 0)],
)
def test_prompts_are_taken_for_the_few_sequences_that_a_probe_may_meet(
    monkeypatch: pytest.MonkeyPatch, steps_to_probe: int, max_tokens: int, num_taken: int
) -> None:
    monkeypatch.setattr("kvbraid.engine.drafted_decoding._NUM_FOR_PROBES", 4)
    drafter = DearDrafter()
    engine = losing_engine(drafter)
    speculation = engine.engine._speculation
    assert isinstance(speculation, DraftedDecoding)
    speculation.policy = WaitingPolicy(steps_to_probe)

    def script() -> Script:
        for i in range(NUM_SEQUENCES):
            prompt = [i + 1, 2, 3]
            engine.submit(f"s{i}", prompt, max_tokens=max_tokens, source=Source.HANDOFF)
        yield from engine.until(lambda: engine.is_granted(f"s{NUM_SEQUENCES - 1}"))
        for i in range(NUM_SEQUENCES):
            engine.engine.abort(key_of(f"s{i}"), lambda found: None)
        yield

    engine.run(script())
    assert len(drafter.granted) == num_taken


class FewPolicy(FixedPolicy):
    """Drafting pays for three sequences, not for more."""

    def steps_to_drafts(self, num_sequences: int) -> int:
        return 0 if num_sequences <= 3 else 1000


def test_prompts_are_not_taken_for_more_sequences_than_drafting_pays_for() -> None:
    drafter = DearDrafter()
    engine = losing_engine(drafter)
    speculation = engine.engine._speculation
    assert isinstance(speculation, DraftedDecoding)
    speculation.policy = FewPolicy(4)

    def script() -> Script:
        for i in range(NUM_SEQUENCES):
            engine.submit(f"s{i}", [i + 1, 2, 3], max_tokens=30, source=Source.HANDOFF)
        yield from engine.until(lambda: engine.is_granted(f"s{NUM_SEQUENCES - 1}"))
        for i in range(NUM_SEQUENCES):
            engine.engine.abort(key_of(f"s{i}"), lambda found: None)
        yield

    engine.run(script())
    assert len(drafter.granted) == 3 < NUM_SEQUENCES


@pytest.mark.parametrize(("steps_to_probe", "is_wanted"), [(64, True), (65, False)])
def test_rows_are_kept_for_a_probe_that_is_near(steps_to_probe: int, is_wanted: bool) -> None:
    engine = losing_engine(DearDrafter())
    speculation = engine.engine._speculation
    assert isinstance(speculation, DraftedDecoding)
    speculation.policy = WaitingPolicy(steps_to_probe)
    engine.submit("a", [1, 2, 3], max_tokens=5)
    engine.run(idle())
    assert speculation.wants_taps is is_wanted


class OtherTextsPolicy(WaitingPolicy):
    """New sequences would be drafted for, these are not."""

    def __init__(self) -> None:
        super().__init__(0)

    def expects_drafts(self) -> bool:
        return False


def test_rows_of_prompts_are_kept_where_those_of_the_present_texts_are_not() -> None:
    engine = losing_engine(DearDrafter())
    speculation = engine.engine._speculation
    assert isinstance(speculation, DraftedDecoding)
    speculation.policy = OtherTextsPolicy()

    def script() -> Script:
        engine.submit("a", [1, 2, 3], max_tokens=20)
        yield from engine.until(lambda: len(engine.tokens("a")) > 5)
        engine.submit("b", [4, 5], max_tokens=5)
        yield from engine.until(lambda: len(engine.tokens("b")) > 2)

    engine.run(script())
    with_taps = [(len(p.decodes), len(p.extends)) for p in engine.plans if p.taps and p.has_compute]
    # The first plan of all is made before a sequence decodes.
    assert with_taps == [(0, 1), (1, 1)]


class TurningPolicy(FixedPolicy):
    """On for three steps, off for three, and so on; no probe is near while it is off."""

    def __init__(self) -> None:
        super().__init__(4)
        self._num_plans = 0

    def steps_to_drafts(self, num_sequences: int) -> int:
        return 1000

    def plan(self, slots: Seq[int], limits: Seq[int]) -> DraftPlan:
        self._num_plans += 1
        if self._num_plans // 3 % 2:
            return DraftPlan((0,) * len(slots), 1, reason=PlainReason.BELOW_BREAK_EVEN)
        return super().plan(slots, limits)


def test_what_rejected_drafts_left_is_not_taken_for_rows_of_tokens_that_came_while_off() -> None:
    drafter = ToyDrafter(wrong)
    engine = drafted_engine(drafter, policy=TurningPolicy())
    engine.submit("a", [1, 2, 3], max_tokens=40)
    engine.run(idle())
    # The drafter compares the rows that it is told with the tokens.
    assert engine.tokens("a") == expected([1, 2, 3], 40)
    assert sum(task.starts_cold for task in drafter.tasks) > 1


def test_a_losing_policy_is_asked_now_and_then_and_told_of_all() -> None:
    reports: list[SpeculationReport] = []
    engine = losing_engine(DearDrafter(), reports.append)
    speculation = engine.engine._speculation
    assert isinstance(speculation, DraftedDecoding)
    policy = speculation.policy
    assert isinstance(policy, DraftPolicy)
    asked: list[int] = []
    plan = policy.plan
    policy.plan = lambda slots, limits: asked.append(len(slots)) or plan(slots, limits)  # type: ignore[func-returns-value,method-assign]
    looked_at: list[int] = []
    stays_plain = policy.stays_plain
    policy.stays_plain = lambda size: looked_at.append(size) or stays_plain(size)  # type: ignore[func-returns-value,method-assign]

    def script() -> Script:
        engine.submit("a", [1, 2, 3], max_tokens=100)
        yield from engine.until(lambda: len(engine.tokens("a")) > 70)
        engine.submit("b", [4, 5], max_tokens=10)
        yield

    engine.run(script())
    assert engine.tokens("a") == expected([1, 2, 3], 100)
    assert asked == [1, 1], "whoever comes and goes: drafting is lost for two as for one"
    assert set(looked_at) == {1, 2}
    assert len(looked_at) < 30, "what a plain step takes is known after a few of each size"
    # The first token of each comes with its prompt, and for the last one nothing is drafted.
    num_windows = 99 + 9
    counted = sum(report.plain["not_worthwhile"] for report in reports)
    assert num_windows - 2 <= counted <= num_windows
    assert sum(policy.plain_steps.values()) in (98, 99)
