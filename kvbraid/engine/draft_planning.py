"""Asks a draft policy what to do and tells it what came of it, while the device is busy where that
is possible: a plan and its books take as long as a tenth of a short step.

The plan for the next step of the same sequences is made while this one runs, so it does not know
this one's outcome yet.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

from kvbraid.engine.quiet_steps import QuietSteps, are_same
from kvbraid.engine.sequence import Sequence
from kvbraid.engine.speculation import SpeculationReport
from kvbraid.speculative.break_even import PlainReason
from kvbraid.speculative.draft_plan import DraftPlan, Policy, StepOutcome

_NOT_WORTHWHILE = "not_worthwhile"


class Asking(NamedTuple):
    """Sequences that decode in a step. numbers: the policy's. limits: most drafts of each."""

    decoding: Seq[Sequence]
    numbers: Seq[int]
    limits: Seq[int]

    def is_of(self, decoding: Seq[Sequence]) -> bool:
        """Whether these are the sequences, in this order."""
        return are_same(decoding, self.decoding)


class _Executed(NamedTuple):
    """A step that ran. began_s: when its planning did."""

    outcome: StepOutcome
    report: SpeculationReport
    began_s: float

    def until(self, now_s: float) -> _Executed:
        """The next step of the same sequences begins: all that was not drafting is this step's,
        also what was done with its tokens. A drafted step has more of that than a plain one."""
        seconds = now_s - self.began_s - self.outcome.draft_seconds
        if seconds <= self.outcome.step_seconds:
            return self
        return self._replace(outcome=replace(self.outcome, step_seconds=seconds))


class DraftPlanning:
    """Used by rank 0's engine thread. policy: may be changed while nothing runs."""

    def __init__(
        self,
        policy: Policy,
        *,
        limit: Callable[[Sequence], int],
        on_report: Callable[[SpeculationReport], None],
    ) -> None:
        """limit: most drafts of a sequence in its next step."""
        self.policy = policy
        self._limit = limit
        self._on_report = on_report
        self._is_worthwhile = True
        # Quiet steps: whether this one is, how many more may be, and what ran untold.
        self._is_quiet = False
        self._num_allowed = 0
        self._quiet = QuietSteps()
        # Numbers of sequences with which the next steps are quiet, whichever sequences they are,
        # and need not be timed.
        self.restful: set[int] = set()
        self._asked: Asking | None = None
        self._ahead: DraftPlan | None = None
        self._executed: _Executed | None = None

    def change_policy(self, policy: Policy) -> None:
        """Tell the old one of what has run; the new one begins with nothing allowed."""
        self.end(SpeculationReport())
        self.policy = policy
        self._allow(0)

    def begin(self, decoding: Seq[Sequence], now_s: float) -> None:
        """A step of these sequences begins."""
        self._quiet.begin(decoding, now_s)
        executed, asked = self._executed, self._asked
        if executed is not None and asked is not None and asked.is_of(decoding):
            self._executed = executed.until(now_s)

    def is_quiet(self, decoding: Seq[Sequence], num_active: int) -> bool:
        """Whether the next step, of these sequences, needs no plan and no drafts: they are those
        that were asked about, or it would make no difference to the policy that they are not, or
        there will soon be num_active, for which none would be asked: to begin for the first ones
        of a batch, and tell the drafter their prompts, costs more than those steps bring."""
        size = len(decoding)
        self._is_quiet = False
        if 0 < size < num_active and self.policy.steps_to_drafts(num_active):
            self._is_quiet, self._is_worthwhile = True, False
        elif size and self._num_allowed > 0:
            if self.policy.stays_plain(size):
                self._is_quiet = True
                if not self._quiet.is_timing(size) and self._executed is None:
                    self.restful.add(size)
            elif (asked := self._asked) is not None:
                self._is_quiet = asked.is_of(decoding)
        return self._is_quiet

    def plan(self, asking: Asking, report: SpeculationReport) -> DraftPlan:
        """What to ask of the drafter. report: of this step; gets the plain steps before it too."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._asked is not None and self._asked.is_of(asking.decoding):
            plan = _within(ahead, asking.limits)
        else:
            self.settle()
            self._tell_of_quiet_steps(report)
            plan = self.policy.plan(asking.numbers, asking.limits)
        self._asked = asking
        self._allow(plan.num_same)
        self._is_worthwhile = plan.reason in (None, PlainReason.NOT_ALLOWED)
        self._count_plain(len(asking.decoding), report)
        return plan

    def end(self, report: SpeculationReport) -> None:
        """Nothing decodes in the next step. report: of the plain steps before it. What the last
        plan allows goes on: the next text may be one that need not be asked about."""
        num_allowed = self._num_allowed
        self.settle()
        self._tell_of_quiet_steps(report)
        self._allow(num_allowed)
        self._asked = self._ahead = None
        if report.plain:
            self._on_report(report)

    def _allow(self, num_quiet: int) -> None:
        self._num_allowed = num_quiet
        self.restful.clear()

    def _tell_of_quiet_steps(self, report: SpeculationReport) -> None:
        self._allow(0)
        taken = self._quiet.take()
        if taken.num_steps:
            self.policy.skip(taken.num_steps, taken.seconds)
            self._count_plain(taken.num_windows, report)

    def quiet_step_ran(self, num_windows: int, *, is_timed: bool) -> None:
        """A quiet step was executed, see `QuietSteps.ran`."""
        self._quiet.ran(num_windows, is_timed=is_timed)
        self._num_allowed = max(0, self._num_allowed - 1)
        if not self._num_allowed:
            self.restful.clear()

    def ran(self, outcome: StepOutcome, report: SpeculationReport, began_s: float) -> None:
        """A planned step was executed. The policy and the metrics learn of it a little later.
        began_s: when its planning began, by the clock of `begin`."""
        self._executed = _Executed(outcome, report, began_s)

    def settle(self) -> None:
        """Tell what has run: before the policy's numbers are given to others."""
        executed, self._executed = self._executed, None
        if executed is not None:
            self.policy.record(executed.outcome)
            self._on_report(executed.report)

    def meanwhile(self) -> None:
        """The device is busy: keep the books, and plan the next step of the same sequences."""
        self.settle()
        asked = self._asked
        if asked is not None and not self._is_quiet and not self._num_allowed:
            limits = [self._limit(sequence) for sequence in asked.decoding]
            self._ahead = self.policy.plan(asked.numbers, limits)

    def _count_plain(self, num_windows: int, report: SpeculationReport) -> None:
        if not self._is_worthwhile and num_windows:
            report.plain[_NOT_WORTHWHILE] += num_windows


def _within(plan: DraftPlan, limits: Seq[int]) -> DraftPlan:
    """A sequence has fewer tokens left than when the plan was made."""
    return replace(plan, num_wanted=tuple(map(min, plan.num_wanted, limits)))
