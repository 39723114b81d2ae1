"""Decoding with a drafter: what is asked of it for each step, and what is learnt from the outcome.

`draft` tells the drafter which rows were committed and puts its drafts on the sequences; the
scheduler plans them as far as pages and limits allow; every rank verifies them; `verified` is told
the outcome. Whatever a drafter does, the tokens are the target's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from kvbraid.engine.draft_drawing import DraftDrawing, WindowSampling
from kvbraid.engine.draft_planning import Asking, DraftPlanning
from kvbraid.engine.draft_tasks import TaskRows, Wanted, draft_tasks
from kvbraid.engine.sequence import EngineRequest, Sequence, SequenceKey
from kvbraid.engine.speculation import SpeculationReport, VerifiedWindow
from kvbraid.engine.step_plan import StepPlan
from kvbraid.kv.slots import slots_between
from kvbraid.speculative.acceptance import usable_drafts
from kvbraid.speculative.break_even import PlainReason
from kvbraid.speculative.draft_plan import STEPS_BEFORE_PROBE, DraftPlan, Policy, StepOutcome
from kvbraid.speculative.drafting import Drafting
from kvbraid.speculative.fused_rows import FusedRows
from kvbraid.speculative.proposal import DraftTask, Proposal, Resync
from kvbraid.transport.draft_grant import DraftGrant

# While drafting does not pay, rows of prompts are taken for so many sequences, which a probe finds
# warm; the rest starts cold, should drafting pay again. Were it fewer than a small batch has, a
# probe would judge by drafts behind texts of which the drafter knows the end only.
_NUM_FOR_PROBES = 16


class GrantingDrafting(Drafting, Protocol):
    """A drafter that takes the rows of prompts from the workers that compute them."""

    def open_grant(self, key: str, end_position: int) -> DraftGrant | None:
        """Rows [0, end_position) of `key` may be pushed there; None where nothing takes them."""
        ...

    def take_rows(self) -> None:
        """Take what was pushed since the last step, also where nothing decodes."""
        ...

    def await_rows(self, keys: Seq[str]) -> Collection[str]:
        """These sequences are drafted for next; those among them whose prompt's rows are still on
        the way, and which therefore decode plainly in this step."""
        ...


@dataclass(slots=True)
class _Told:
    """A sequence that the drafter knows. number: the policy's. drawn_at: how drafts behind an
    anchor are drawn. stops: tokens that end it. num_rows: rows that the drafter holds as far as we
    know."""

    key: str
    number: int
    drawn_at: WindowSampling
    stops: frozenset[int]
    num_rows: int = 0
    num_proposed: int = 0
    confidences: tuple[float, ...] = ()


@dataclass(slots=True)
class _Round:
    """What was asked for the step that is being planned. draft_s: all that drafting delays it
    by. width: of the windows that the policy wants."""

    began_s: float = 0.0
    told: dict[int, _Told] = field(default_factory=dict)
    num_asked: int = 0
    num_drafting: int = 0
    told_prompts: bool = False
    draft_s: float = 0.0
    width: int = 1
    reason: PlainReason | None = None


class DraftedDecoding:
    """Speculation with a drafter, embedded or remote. policy: may be changed while nothing runs."""

    def __init__(
        self,
        drafting: GrantingDrafting,
        rows: FusedRows,
        policy: Policy,
        drawing: DraftDrawing,
        *,
        logical_page_size: int,
        max_model_len: int,
        vocab_size: int,
        on_report: Callable[[SpeculationReport], None],
        task_rows: TaskRows | None = None,
    ) -> None:
        """task_rows: `rows` as the drafter gets them; in host memory unless given."""
        self._vocab_size = vocab_size
        self._drafting = drafting
        self._rows = rows
        self._task_rows = task_rows or rows
        self._planning = DraftPlanning(policy, limit=self._limit, on_report=on_report)
        self._drawing = drawing
        self._page_size = logical_page_size
        self._max_model_len = max_model_len
        self._told: dict[SequenceKey, _Told] = {}
        self._receiving: dict[str, Sequence] = {}
        # Of the last step: those in quiet steps are not told of.
        self._num_active = 0
        self._is_resting = False
        # Where nothing will be drafted for these sequences for long, taps are not kept.
        self.wants_taps = True
        self._round: _Round | None = None
        self._report = SpeculationReport()

    @property
    def policy(self) -> Policy:
        """May be changed while nothing runs."""
        return self._planning.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._planning.change_policy(policy)

    @property
    def wants_prompt_taps(self) -> bool:
        """See Speculation: also where the present sequences are not drafted for."""
        return self.wants_taps or self._steps_to_new() <= STEPS_BEFORE_PROBE

    @property
    def max_draft_tokens(self) -> int:
        """Most drafts of a step."""
        return self._drafting.max_draft_tokens

    def open_grant(self, sequence: Sequence) -> DraftGrant | None:
        """See Speculation. The drafter gets the prompt's rows there, and none of them from here."""
        if not self._limit(sequence) or not self._may_meet_drafts(sequence):
            return None
        told, num_rows = self._telling(sequence), len(sequence.token_ids)
        grant = self._drafting.open_grant(told.key, num_rows)
        if grant is not None:
            told.num_rows = num_rows
            self._receiving[told.key] = sequence
        return grant

    def queued(self, request: EngineRequest) -> None:
        """See Speculation: nothing yet."""

    def _may_meet_drafts(self, sequence: Sequence) -> bool:
        num_steps = self._steps_to_new()
        if num_steps == 0:
            return True
        longest = min(STEPS_BEFORE_PROBE, sequence.num_emittable(self._max_model_len))
        return num_steps <= longest and len(self._receiving) < _NUM_FOR_PROBES

    def _steps_to_new(self) -> int:
        """Steps in which no drafts are asked for, were all of these sequences new ones."""
        return self.policy.steps_to_drafts(max(self._num_active, len(self._told) + 1))

    def keep_rows(self, key: str, first_position: int, rows: Tensor) -> None:
        """Rows [n, d] of a prompt that another worker computes have come. The drafter is told of
        them with the first drafts that it is asked for; they stay with cached pages."""
        sequence, end = self._receiving.get(key), first_position + len(rows)
        # A preempted sequence has no pages, and will make its rows itself.
        if sequence is not None and end <= len(sequence.pages) * self._page_size:
            self._telling(sequence).num_rows = 0
            slots = slots_between(sequence.pages, first_position, end, self._page_size)
            self._rows.put(slots, rows)

    def draft(self, active: Seq[Sequence]) -> None:
        """See Speculation. While drafting is off, most steps are not planned here, and most of
        those not even looked at: in a short step each call from cold caches can be felt."""
        self._drafting.take_rows()
        self._num_active = len(active)
        self._is_resting = self._num_active in self._planning.restful
        if self._is_resting:
            return
        began = time.monotonic()
        decoding = [s for s in active if s.can_decode]
        self._planning.begin(decoding, began)
        if self._planning.is_quiet(decoding, len(active)):
            self._round = None
            return
        self._round, self._report = _Round(began), SpeculationReport()
        if decoding:
            self._plan(decoding, self._round)
            return
        self._planning.end(self._report)

    def _plan(self, decoding: list[Sequence], asked: _Round) -> None:
        self._drawing.begin()
        told = [self._telling(s) for s in decoding]
        limits = [self._limit(s) for s in decoding]
        plan = self._planning.plan(Asking(decoding, [t.number for t in told], limits), self._report)
        self._want_taps(decoding, any(plan.num_wanted) or self.policy.expects_drafts())
        asked.reason = plan.reason
        asked.told = {s.slot: t for s, t in zip(decoding, told, strict=True)}
        for sequence, entry in zip(decoding, told, strict=True):
            sequence.drafts, entry.num_proposed, entry.confidences = (), 0, ()
        if any(plan.num_wanted):
            self._draft(decoding, told, plan, limits, asked)

    def _want_taps(self, decoding: Seq[Sequence], is_wanted: bool) -> None:
        if self.wants_taps and not is_wanted:
            # What rejected drafts left there is not of the tokens that will come.
            for sequence in decoding:
                first, end = len(sequence.token_ids) - 1, len(sequence.pages) * self._page_size
                self._rows.forget(slots_between(sequence.pages, first, end, self._page_size))
        self.wants_taps = is_wanted

    def _draft(
        self,
        decoding: Seq[Sequence],
        told: Seq[_Told],
        plan: DraftPlan,
        limits: Seq[int],
        asked: _Round,
    ) -> None:
        self._ask(decoding, told, plan, asked)
        asked.draft_s = time.monotonic() - asked.began_s
        asked.width = self.policy.width(
            plan,
            [t.number for t in told],
            limits=limits,
            num_drafts=[len(s.drafts) for s in decoding],
            confidences=[t.confidences for t in told],
            draft_seconds=asked.draft_s,
        )
        for sequence in decoding:
            sequence.drafts = sequence.drafts[: asked.width - 1]

    def verified(self, plan: StepPlan, tokens: Mapping[int, Seq[int]], seconds: float) -> None:
        """See Speculation."""
        asked = self._round
        if not plan.decodes:
            return
        if asked is None:
            is_timed = not (plan.extends or self._is_resting)
            self._planning.quiet_step_ran(len(plan.decodes), is_timed=is_timed)
            return
        told = [asked.told[d.slot] for d in plan.decodes]
        num_accepted = [
            _num_accepted(tokens.get(d.slot, ()), t.stops)
            for d, t in zip(plan.decodes, told, strict=True)
        ]
        num_verified = [len(d.drafts) for d in plan.decodes]
        # Behind an accepted token that ends the generation there is nothing to agree about.
        num_judged = [
            a if not t.stops.isdisjoint(tokens.get(d.slot, ())[:a]) else n
            for d, t, n, a in zip(plan.decodes, told, num_verified, num_accepted, strict=True)
        ]
        outcome = StepOutcome(
            slots=[t.number for t in told],
            width=1 + max(num_verified),
            num_verified=num_judged,
            num_accepted=num_accepted,
            confidences=[t.confidences[:n] for t, n in zip(told, num_judged, strict=True)],
            num_asked=asked.num_asked,
            num_drafting=asked.num_drafting,
            told_prompts=asked.told_prompts,
            draft_seconds=asked.draft_s,
            step_seconds=seconds,
            has_prompt_rows=bool(plan.extends),
            has_transfers=bool(plan.collect),
            reason=asked.reason,
        )
        self._report.windows = [
            VerifiedWindow(t.num_proposed, n, a)
            for t, n, a in zip(told, num_verified, num_accepted, strict=True)
            if t.num_proposed
        ]
        if num_unverified := sum(window.num_verified == 0 for window in self._report.windows):
            reason = "no_room" if asked.width > 1 else "not_worthwhile"
            self._report.plain[reason] += num_unverified
        self._report.tap_s = self._rows.take_tap_seconds()
        self._report.draft_s, self._report.verify_s = asked.draft_s, seconds
        self._planning.ran(outcome, self._report, asked.began_s)

    def meanwhile(self) -> None:
        """See Speculation."""
        if not self._is_resting:
            self._planning.meanwhile()

    def drop(self, sequence: Sequence) -> None:
        """See Speculation."""
        told = self._told.pop(sequence.request.key, None)
        if told is not None:
            self._planning.settle()
            self.policy.close(told.number)
            self._receiving.pop(told.key, None)
            self._drafting.drop(told.key)

    def _telling(self, sequence: Sequence) -> _Told:
        key = sequence.request.key
        told = self._told.get(key)
        if told is None:
            name = f"{key.request_id}/{key.attempt}/{key.completion}"
            sampling = sequence.request.sampling
            stops = frozenset(sampling.stop_token_ids)
            drawn_at = self._drawing.open(sampling, key.completion)
            self._planning.settle()
            told = self._told[key] = _Told(name, self.policy.open(), drawn_at, stops)
        return told

    def _limit(self, sequence: Sequence) -> int:
        """Drafts that may come true: the token behind the last one is emitted as well."""
        most = min(self._drafting.max_draft_tokens, sequence.num_emittable(self._max_model_len) - 1)
        asked = sequence.request.sampling.max_draft_tokens
        return max(0, most if asked is None else min(most, asked))

    def _ask(
        self, decoding: Seq[Sequence], told: Seq[_Told], plan: DraftPlan, asked: _Round
    ) -> None:
        wanting = [
            (sequence, entry, num_wanted)
            for sequence, entry, num_wanted in zip(decoding, told, plan.num_wanted, strict=True)
            if num_wanted
        ]
        late = self._drafting.await_rows([entry.key for _, entry, _ in wanting])
        wanting = [item for item in wanting if item[1].key not in late]
        if not wanting:
            return
        wanted = [
            Wanted(sequence, entry.key, entry.num_rows, num_wanted, entry.drawn_at)
            for sequence, entry, num_wanted in wanting
        ]
        tasks = draft_tasks(wanted, self._task_rows, self._page_size)
        answers = self._drafting.step(tasks)
        asked.num_asked = max(num_wanted for _, _, num_wanted in wanting)
        asked.num_drafting = len(tasks)
        # More rows than a window leaves behind.
        asked.told_prompts = any(len(task.rows) > self.max_draft_tokens + 1 for task in tasks)
        for (sequence, entry, _), task, answer in zip(wanting, tasks, answers, strict=True):
            match answer:
                case Proposal():
                    entry.num_rows = task.anchor_position
                    self._take(sequence, entry, answer, task)
                case Resync():
                    entry.num_rows = answer.num_rows

    def _take(self, sequence: Sequence, told: _Told, proposal: Proposal, task: DraftTask) -> None:
        """An id outside the vocabulary must not reach an embedding: the drafts end before it."""
        num_wanted = task.num_wanted
        if num_wanted and not self._drawing.is_usable(sequence.slot, proposal, task.sampling):
            proposal = Proposal()
        drafts = tuple(usable_drafts(proposal.token_ids[:num_wanted], self._vocab_size))
        if len(drafts) < len(proposal.token_ids):
            self._report.plain["bad_ids"] += 1
        elif num_wanted and not drafts:
            self._report.plain["no_proposal"] += 1
        told.num_proposed, told.confidences = len(drafts), proposal.confidences[: len(drafts)]
        sequence.drafts = drafts


def _num_accepted(tokens: Seq[int], stops: Collection[int]) -> int:
    """Drafts among a window's tokens that are emitted: none behind one that ends the sequence."""
    drafts = tokens[:-1]
    up_to_stops = (number for number, token_id in enumerate(drafts, 1) if token_id in stops)
    return next(up_to_stops, len(drafts))
