"""Drafts take pages and tokens of a step that nobody else needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from kvbraid.engine.speculation import SpeculationReport
from kvbraid.engine.step_plan import StepPlan
from kvbraid.speculative.break_even import PlainReason
from kvbraid.speculative.draft_plan import DraftPlan
from kvbraid.speculative.fixed_policy import FixedPolicy
from tests.unit.engine.drafted_engine import ToyDrafter, drafted_engine, idle, right, wrong
from tools.scripted_engine import Script
from tools.toy_rank import expected


def test_drafts_leave_room_for_prompts_that_wait() -> None:
    engine = drafted_engine(ToyDrafter(right), max_num_batched_tokens=10)

    def script() -> Script:
        engine.submit("a", [1, 2, 3], max_tokens=150)
        engine.submit("b", [4, 5], max_tokens=150)
        yield from engine.until(lambda: engine.plans and len(engine.plans[-1].decodes) == 2)
        assert sum(len(d.drafts) for d in engine.plans[-1].decodes) == 8, "a whole step's"
        engine.submit("c", list(range(20)), max_tokens=1)
        yield from engine.until(lambda: len(engine.tokens("c")) == 1)
        assert max(len(engine.tokens(name)) for name in "ab") < 80
        yield

    engine.run(script())
    assert engine.tokens("a") == expected([1, 2, 3], 150)


def test_proposals_that_are_not_verified_are_counted_with_the_reason() -> None:
    class Narrow(FixedPolicy):
        def width(self, *args: object, **more: object) -> int:
            return 1

    for policy, num_pages, reason in (
        (FixedPolicy(4), 9, "no_room"),
        (Narrow(4), 64, "not_worthwhile"),
        (FixedPolicy(4), 64, None),
    ):
        reports: list[SpeculationReport] = []
        engine = drafted_engine(ToyDrafter(right), reports.append, policy, num_pages=num_pages)
        for name in "ab":
            engine.submit(name, [1, 2, 3], max_tokens=21)
        engine.run(idle())
        assert engine.tokens("a") == engine.tokens("b") == expected([1, 2, 3], 21)
        unverified = sum(w.num_verified == 0 for r in reports for w in r.windows)
        assert (unverified > 0) == (reason is not None)
        counted = sum((r.plain for r in reports), Counter[str]())
        assert counted == ({} if reason is None else {reason: unverified})


def test_drafts_that_find_no_pages_preempt_nobody() -> None:
    engine = drafted_engine(ToyDrafter(wrong), num_pages=1 + 4)
    # While both run, their own tokens fill the pool to the last page.
    engine.submit("a", [1] * 4, max_tokens=4)
    engine.submit("b", [2] * 4, max_tokens=11)
    engine.run(idle())
    assert engine.tokens("a") == expected([1] * 4, 4)
    assert engine.tokens("b") == expected([2] * 4, 11)
    assert engine.scheduler.num_preemptions == 0


class OffOnceOneIsPreempted(FixedPolicy):
    """And then not to be asked for long, whoever comes or goes."""

    def __init__(self) -> None:
        super().__init__(4)
        self.is_off = False

    def stays_plain(self, num_sequences: int) -> bool:
        return self.is_off

    def plan(self, slots: Seq[int], limits: Seq[int]) -> DraftPlan:
        if not self.is_off:
            return super().plan(slots, limits)
        reason = PlainReason.BELOW_BREAK_EVEN
        return DraftPlan((0,) * len(slots), 1, reason=reason, num_same=60)


def test_a_preempted_sequence_comes_back_without_its_drafts() -> None:
    """They were drafted behind a token that is no longer its newest."""
    policy = OffOnceOneIsPreempted()
    engine = drafted_engine(
        ToyDrafter(wrong), policy=policy, num_pages=16, keeps_prefixes=False, max_num_seqs=4
    )
    compute = engine.rank.compute
    drafted_while_off: list[int] = []

    def watched(plan: StepPlan) -> object:
        if policy.is_off:
            drafted_while_off.extend(len(decode.drafts) for decode in plan.decodes)
        policy.is_off = engine.scheduler.num_preemptions > 0
        return compute(plan)

    engine.rank.compute = watched  # type: ignore[method-assign,assignment]
    prompts = {"a": ([1] * 3, 55), "c": ([7] * 3, 20), "b": ([4] * 3, 40)}
    for name, (prompt, num_tokens) in prompts.items():
        engine.submit(name, prompt, max_tokens=num_tokens)
    engine.run(idle())
    for name, (prompt, num_tokens) in prompts.items():
        assert engine.tokens(name) == expected(prompt, num_tokens)
    assert policy.is_off
    assert len(drafted_while_off) > 30
    assert sum(drafted_while_off) == 0
