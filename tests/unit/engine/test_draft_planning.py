"""The policy is asked and told while the device is busy, in an order that it can rely on."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

import pytest

from kvbraid.engine.draft_planning import Asking, DraftPlanning
from kvbraid.engine.sequence import Sequence
from kvbraid.engine.speculation import SpeculationReport
from kvbraid.speculative.break_even import PlainReason
from kvbraid.speculative.draft_plan import DraftPlan, StepOutcome
from kvbraid.speculative.fixed_policy import FixedPolicy

REPORT = SpeculationReport()
BEGAN_S = 100.0


class Listening(FixedPolicy):
    """Writes down what it is asked and told."""

    def __init__(self, num_same: int = 0, most_plain: int = 0, most_drafted: int = 99) -> None:
        """most_plain: batches of up to so many stay plain. most_drafted: and of more than so many
        are not drafted for."""
        super().__init__(4)
        self.most_drafted = most_drafted
        self.heard: list[object] = []
        self.num_same = num_same
        self.most_plain = most_plain

    def stays_plain(self, num_sequences: int) -> bool:
        return num_sequences <= self.most_plain

    def steps_to_drafts(self, num_sequences: int) -> int:
        return 0 if num_sequences <= self.most_drafted else 100

    def plan(self, slots: Seq[int], limits: Seq[int]) -> DraftPlan:
        self.heard.append(("plan", *slots, *limits))
        if self.num_same:
            none = (0,) * len(slots)
            reason = PlainReason.BELOW_BREAK_EVEN
            return DraftPlan(none, 1, reason=reason, num_same=self.num_same)
        return super().plan(slots, limits)

    def record(self, outcome: StepOutcome) -> None:
        self.heard.append(("record", *outcome.slots))

    def skip(self, num_steps: int, seconds: Mapping[int, Seq[float]]) -> None:
        self.heard.append(("skip", num_steps))


class Ticket:
    """Stands for a sequence: planning looks at nothing but who it is."""

    def __init__(self, limit: int) -> None:
        self.limit = limit


def planning_of(policy: Listening) -> tuple[DraftPlanning, list[SpeculationReport]]:
    reports: list[SpeculationReport] = []
    planning = DraftPlanning(
        policy, limit=lambda s: cast(Ticket, s).limit, on_report=reports.append
    )
    return planning, reports


def asking(*tickets: Ticket) -> Asking:
    decoding = cast("list[Sequence]", list(tickets))
    return Asking(decoding, list(range(len(tickets))), [ticket.limit for ticket in tickets])


def is_quiet(
    planning: DraftPlanning, *tickets: Ticket, now_s: float = BEGAN_S, num_active: int = 0
) -> bool:
    """A step of these begins, and runs if it is quiet."""
    decoding = asking(*tickets).decoding
    planning.begin(decoding, now_s)
    found = planning.is_quiet(decoding, num_active or len(tickets))
    if found:
        planning.meanwhile()
        planning.quiet_step_ran(len(tickets), is_timed=True)
    return found


def outcome(*slots: int) -> StepOutcome:
    return StepOutcome(
        slots=slots,
        width=1,
        num_verified=[0] * len(slots),
        num_accepted=[0] * len(slots),
        confidences=[()] * len(slots),
        num_asked=0,
        num_drafting=0,
        draft_seconds=0.0,
        step_seconds=1.0,
        has_prompt_rows=False,
    )


def test_books_are_kept_and_the_next_plan_is_made_while_a_step_runs() -> None:
    policy = Listening()
    planning, reports = planning_of(policy)
    ticket = Ticket(limit=9)
    planning.plan(asking(ticket), REPORT)
    planning.ran(outcome(0), REPORT, BEGAN_S)
    assert (policy.heard, reports) == ([("plan", 0, 9)], [])
    planning.meanwhile()
    assert policy.heard[1:] == [("record", 0), ("plan", 0, 9)]
    assert reports == [REPORT]
    planning.plan(asking(ticket), REPORT)
    assert len(policy.heard) == 3, "the plan was there already"


def test_a_plan_made_ahead_keeps_to_the_limits_of_its_step() -> None:
    planning, _ = planning_of(Listening())
    near, far = Ticket(limit=3), Ticket(limit=9)
    planning.plan(asking(near, far), REPORT)
    planning.meanwhile()
    near.limit = 1
    assert planning.plan(asking(near, far), REPORT).num_wanted == (1, 4)


def test_other_sequences_are_planned_for_after_the_books_are_kept() -> None:
    policy = Listening()
    planning, _ = planning_of(policy)
    old, new = Ticket(limit=9), Ticket(limit=8)
    planning.plan(asking(old), REPORT)
    planning.meanwhile()
    planning.ran(outcome(0), REPORT, BEGAN_S)
    planning.plan(asking(old, new), REPORT)
    assert policy.heard[2:] == [("record", 0), ("plan", 0, 1, 9, 8)]


@pytest.mark.parametrize("num_quiet", [1, 5])
def test_quiet_steps_are_told_together_after_the_step_before_them(num_quiet: int) -> None:
    policy = Listening(num_same=5)
    planning, reports = planning_of(policy)
    ticket, report = Ticket(limit=9), SpeculationReport()
    planning.plan(asking(ticket), SpeculationReport())
    planning.ran(outcome(0), REPORT, BEGAN_S)
    for _ in range(num_quiet):
        assert is_quiet(planning, ticket)
    planning.end(report)
    assert policy.heard == [("plan", 0, 9), ("record", 0), ("skip", num_quiet)]
    assert reports == [REPORT, report]
    assert report.plain["not_worthwhile"] == num_quiet


@pytest.mark.parametrize(
    ("now_s", "is_same", "seconds"),
    [(BEGAN_S + 4.5, True, 4.0), (BEGAN_S + 4.5, False, 1.0), (BEGAN_S + 1.2, True, 1.0)],
)
def test_a_step_lasts_until_the_next_one_of_its_sequences(
    now_s: float, is_same: bool, seconds: float
) -> None:
    """What is done with its tokens is its own: plain and drafted steps are compared by it."""
    told: list[StepOutcome] = []
    planning, _ = planning_of(Listening())
    planning.policy.record = told.append  # type: ignore[method-assign]
    ticket, other = Ticket(limit=9), Ticket(limit=9)
    planning.plan(asking(ticket), REPORT)
    planning.ran(replace(outcome(0), draft_seconds=0.5), REPORT, BEGAN_S)
    planning.begin(asking(*([ticket] if is_same else [ticket, other])).decoding, now_s)
    planning.meanwhile()
    assert [one.step_seconds for one in told] == [seconds]


def test_sequences_that_come_and_go_need_no_plan_where_all_stays_plain() -> None:
    policy = Listening(num_same=5, most_plain=2)
    planning, _ = planning_of(policy)
    first, second, third = Ticket(limit=9), Ticket(limit=9), Ticket(limit=9)
    planning.plan(asking(first), REPORT)
    assert is_quiet(planning, first, second)
    assert is_quiet(planning, second)
    assert not is_quiet(planning, first, second, third), "so many may draft"
    assert not is_quiet(planning), "nothing runs: what ran is to be told"
    for _ in range(3):
        assert is_quiet(planning, second, third)
    assert not is_quiet(planning, second, third), "five in all"


@pytest.mark.parametrize("most_plain", [0, 1])
def test_what_is_allowed_outlasts_a_pause(most_plain: int) -> None:
    policy = Listening(num_same=3, most_plain=most_plain)
    planning, _ = planning_of(policy)
    planning.plan(asking(Ticket(limit=9)), REPORT)
    for _ in range(5):
        planning.end(SpeculationReport())
    quiet = [is_quiet(planning, Ticket(limit=9)) for _ in range(4)]
    assert quiet == [bool(most_plain)] * 3 + [False]


def test_a_policy_is_not_told_of_steps_that_another_one_planned() -> None:
    first, second = Listening(), Listening()
    planning, _ = planning_of(first)
    planning.plan(asking(Ticket(limit=9)), REPORT)
    planning.ran(outcome(0), REPORT, BEGAN_S)
    planning.settle()
    planning.policy = second
    planning.end(SpeculationReport())
    assert first.heard[-1] == ("record", 0)
    assert second.heard == []


def test_steps_need_not_be_looked_at_once_their_price_is_known() -> None:
    policy = Listening(num_same=40, most_plain=2)
    planning, _ = planning_of(policy)
    ticket = Ticket(limit=9)
    planning.plan(asking(ticket), REPORT)
    planning.ran(outcome(0), REPORT, BEGAN_S)
    num_looked_at = 0
    while not planning.restful:
        num_looked_at += 1
        assert is_quiet(planning, ticket, now_s=BEGAN_S + num_looked_at)
    assert planning.restful == {1}
    assert policy.heard[1:] == [("record", 0)], "the books are kept before"
    for _ in range(40 - num_looked_at):
        assert planning.restful == {1}
        planning.quiet_step_ran(1, is_timed=False)
    assert not planning.restful, "the policy allowed no more"
    assert not is_quiet(planning, ticket)
    planning.plan(asking(ticket), REPORT)
    assert policy.heard[2] == ("skip", 40)


def test_sequences_that_others_may_not_replace_are_looked_at_in_each_step() -> None:
    planning, _ = planning_of(Listening(num_same=40, most_plain=0))
    ticket = Ticket(limit=9)
    planning.plan(asking(ticket), REPORT)
    for step in range(40):
        assert is_quiet(planning, ticket, now_s=BEGAN_S + step)
        assert not planning.restful


@pytest.mark.parametrize("ends", ["plan", "end"])
def test_a_plan_or_a_pause_ends_the_rest(ends: str) -> None:
    planning, _ = planning_of(Listening(num_same=40, most_plain=2))
    ticket = Ticket(limit=9)
    planning.plan(asking(ticket), REPORT)
    step = 0
    while not planning.restful:
        is_quiet(planning, ticket, now_s=BEGAN_S + (step := step + 1))
    if ends == "plan":
        planning.plan(asking(ticket, ticket), REPORT)
    else:
        planning.end(SpeculationReport())
    assert not planning.restful


def test_the_first_ones_of_a_batch_that_is_too_large_are_not_drafted_for() -> None:
    policy = Listening(most_drafted=2)
    planning, _ = planning_of(policy)
    first, second = Ticket(limit=9), Ticket(limit=9)
    assert is_quiet(planning, first, num_active=8)
    assert is_quiet(planning, first, second, num_active=8)
    assert not is_quiet(planning, first, num_active=2), "so many will be drafted for"
    assert not is_quiet(planning, first, second, num_active=2)
    assert policy.heard == []
    report = SpeculationReport()
    planning.plan(asking(first, second), report)
    assert policy.heard == [("skip", 2), ("plan", 0, 1, 9, 9)]
    assert report.plain["not_worthwhile"] == 3
