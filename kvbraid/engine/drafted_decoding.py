"""Decoding with a drafter: what is asked of it for each step, and what is learnt from the outcome.

`draft` tells the drafter which rows were committed and puts its drafts on the sequences; the
scheduler plans them as far as pages and limits allow; every rank verifies them; `verified` is told
the outcome. Whatever a drafter does, the tokens are the target's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvbraid.engine.sequence import Sequence, SequenceKey
from kvbraid.engine.speculation import SpeculationReport, VerifiedWindow
from kvbraid.engine.step_plan import StepPlan
from kvbraid.kv.slots import LogicalSlots, slots_of
from kvbraid.request import SamplingParams
from kvbraid.sampling_key import sampling_key
from kvbraid.speculative.acceptance import usable_drafts
from kvbraid.speculative.break_even import PlainReason
from kvbraid.speculative.draft_policy import DraftPlan, StepOutcome
from kvbraid.speculative.drafting import Drafting
from kvbraid.speculative.fused_rows import FusedRows
from kvbraid.speculative.proposal import DraftSampling, DraftTask, Proposal, Resync
from kvbraid.transport.draft_grant import DraftGrant

# Most rows of one sequence in one step: a long prompt is told over several steps, and only then
# drafted for.
_MAX_ROWS = 1024


class Policy(Protocol):
    """Decides how much is drafted and verified; `kvbraid.speculative.draft_policy.DraftPolicy`."""

    def open(self) -> int:
        """A number for a new sequence."""
        ...

    def close(self, slot: int) -> None:
        """The sequence has ended."""
        ...

    def plan(self, slots: Seq[int], limits: Seq[int]) -> DraftPlan:
        """What to ask the drafter for; limits: most drafts of each sequence."""
        ...

    def width(
        self,
        plan: DraftPlan,
        slots: Seq[int],
        *,
        limits: Seq[int],
        num_drafts: Seq[int],
        confidences: Seq[Seq[float]],
        draft_seconds: float,
    ) -> int:
        """Rows of each sequence in the verify step."""
        ...

    def record(self, outcome: StepOutcome) -> None:
        """Learn from an executed step."""
        ...


class GrantingDrafting(Drafting, Protocol):
    """A drafter that takes the rows of prompts from the workers that compute them."""

    def open_grant(self, key: str, end_position: int) -> DraftGrant | None:
        """Rows [0, end_position) of `key` may be pushed there; None where nothing takes them."""
        ...

    def take_rows(self) -> None:
        """Give the drafter what was pushed since the last step, also where nothing decodes."""
        ...


@dataclass(slots=True)
class _Told:
    """A sequence that the drafter knows. number: the policy's. stops: tokens that end it.
    num_rows: rows that the drafter holds as far as we know."""

    key: str
    number: int
    sampling: DraftSampling
    stops: frozenset[int]
    num_rows: int = 0
    num_proposed: int = 0
    confidences: tuple[float, ...] = ()


@dataclass(slots=True)
class _Round:
    """What was asked for the step that is being planned."""

    told: dict[int, _Told] = field(default_factory=dict)
    num_asked: int = 0
    num_drafting: int = 0
    draft_s: float = 0.0


class DraftedDecoding:
    """Speculation with a drafter, embedded or remote. policy: may be changed while nothing runs."""

    def __init__(
        self,
        drafting: GrantingDrafting,
        rows: FusedRows,
        policy: Policy,
        *,
        logical_page_size: int,
        max_model_len: int,
        vocab_size: int,
        on_report: Callable[[SpeculationReport], None],
    ) -> None:
        self._vocab_size = vocab_size
        self._drafting = drafting
        self._rows = rows
        self.policy = policy
        self._page_size = logical_page_size
        self._max_model_len = max_model_len
        self._on_report = on_report
        self._told: dict[SequenceKey, _Told] = {}
        self._round = _Round()
        self._report = SpeculationReport()

    @property
    def max_draft_tokens(self) -> int:
        """Most drafts of a step."""
        return self._drafting.max_draft_tokens

    def open_grant(self, sequence: Sequence) -> DraftGrant | None:
        """See Speculation. The drafter gets the prompt's rows there, and none of them from here."""
        if sequence.request.sampling.max_draft_tokens == 0:
            return None
        told, num_rows = self._telling(sequence), len(sequence.token_ids)
        grant = self._drafting.open_grant(told.key, num_rows)
        if grant is not None:
            told.num_rows = num_rows
        return grant

    def draft(self, active: Seq[Sequence]) -> None:
        """See Speculation."""
        self._round, self._report = _Round(), SpeculationReport()
        self._drafting.take_rows()
        decoding = [s for s in active if s.can_decode]
        if not decoding:
            return
        told = [self._telling(s) for s in decoding]
        numbers = [t.number for t in told]
        limits = [self._limit(s) for s in decoding]
        plan = self.policy.plan(numbers, limits)
        self._round.told = {s.slot: t for s, t in zip(decoding, told, strict=True)}
        for sequence, entry in zip(decoding, told, strict=True):
            sequence.drafts, entry.num_proposed, entry.confidences = (), 0, ()
        self._ask(decoding, told, plan)
        width = self.policy.width(
            plan,
            numbers,
            limits=limits,
            num_drafts=[len(s.drafts) for s in decoding],
            confidences=[t.confidences for t in told],
            draft_seconds=self._round.draft_s,
        )
        for sequence in decoding:
            sequence.drafts = sequence.drafts[: width - 1]
        if plan.reason not in (None, PlainReason.NOT_ALLOWED):
            self._report.plain["not_worthwhile"] += len(decoding)

    def verified(self, plan: StepPlan, tokens: Mapping[int, Seq[int]], seconds: float) -> None:
        """See Speculation."""
        if not plan.decodes:
            return
        told = [self._round.told[d.slot] for d in plan.decodes]
        num_accepted = [max(0, len(tokens.get(d.slot, ())) - 1) for d in plan.decodes]
        num_verified = [len(d.drafts) for d in plan.decodes]
        # Behind an accepted token that ends the generation there is nothing to agree about.
        num_judged = [
            a if not t.stops.isdisjoint(tokens.get(d.slot, ())[:a]) else n
            for d, t, n, a in zip(plan.decodes, told, num_verified, num_accepted, strict=True)
        ]
        self.policy.record(
            StepOutcome(
                slots=[t.number for t in told],
                width=1 + max(num_verified),
                num_verified=num_judged,
                num_accepted=num_accepted,
                confidences=[t.confidences[:n] for t, n in zip(told, num_judged, strict=True)],
                num_asked=self._round.num_asked,
                num_drafting=self._round.num_drafting,
                draft_seconds=self._round.draft_s,
                step_seconds=seconds,
                has_prompt_rows=bool(plan.extends),
            )
        )
        self._report.windows = [
            VerifiedWindow(t.num_proposed, n, a)
            for t, n, a in zip(told, num_verified, num_accepted, strict=True)
            if t.num_proposed
        ]
        self._report.tap_s = self._rows.take_tap_seconds()
        self._report.draft_s, self._report.verify_s = self._round.draft_s, seconds
        self._on_report(self._report)

    def drop(self, sequence: Sequence) -> None:
        """See Speculation."""
        told = self._told.pop(sequence.request.key, None)
        if told is not None:
            self.policy.close(told.number)
            self._drafting.drop(told.key)

    def _telling(self, sequence: Sequence) -> _Told:
        key = sequence.request.key
        told = self._told.get(key)
        if told is None:
            name = f"{key.request_id}/{key.attempt}/{key.completion}"
            sampling = sequence.request.sampling
            stops = frozenset(sampling.stop_token_ids)
            drawing = _drawing(sampling, key.completion)
            told = self._told[key] = _Told(name, self.policy.open(), drawing, stops)
        return told

    def _limit(self, sequence: Sequence) -> int:
        """Drafts that may come true: the token behind the last one is emitted as well."""
        most = min(self._drafting.max_draft_tokens, sequence.num_emittable(self._max_model_len) - 1)
        asked = sequence.request.sampling.max_draft_tokens
        return max(0, most if asked is None else min(most, asked))

    def _ask(self, decoding: Seq[Sequence], told: Seq[_Told], plan: DraftPlan) -> None:
        asking = [
            (sequence, entry, self._task(sequence, entry, num_wanted))
            for sequence, entry, num_wanted in zip(decoding, told, plan.num_wanted, strict=True)
            if num_wanted
        ]
        if not asking:
            return
        began = time.monotonic()
        answers = self._drafting.step([task for _, _, task in asking])
        self._round.draft_s = time.monotonic() - began
        self._round.num_asked = max(plan.num_wanted)
        self._round.num_drafting = len(asking)
        for (sequence, entry, task), answer in zip(asking, answers, strict=True):
            match answer:
                case Proposal():
                    entry.num_rows = task.anchor_position
                    self._take(sequence, entry, answer, task.num_wanted)
                case Resync():
                    entry.num_rows = answer.num_rows

    def _take(self, sequence: Sequence, told: _Told, proposal: Proposal, num_wanted: int) -> None:
        """An id outside the vocabulary must not reach an embedding: the drafts end before it."""
        given = proposal.token_ids[:num_wanted]
        drafts = tuple(usable_drafts(given, self._vocab_size))
        if len(drafts) < len(proposal.token_ids):
            self._report.plain["bad_ids"] += 1
        elif num_wanted and not drafts:
            self._report.plain["no_proposal"] += 1
        told.num_proposed, told.confidences = len(drafts), proposal.confidences[: len(drafts)]
        sequence.drafts = drafts

    def _task(self, sequence: Sequence, told: _Told, num_wanted: int) -> DraftTask:
        """The rows that the drafter lacks, as far as they are here: row i goes with token i + 1."""
        newest = len(sequence.token_ids) - 1
        first = min(told.num_rows, newest)
        num_missing = self._rows.num_missing(self._slots(sequence, first, newest))
        first += num_missing
        end = min(newest, first + _MAX_ROWS)
        return DraftTask(
            key=told.key,
            first_position=first,
            rows=self._rows.read(self._slots(sequence, first, end)),
            next_token_ids=tuple(sequence.token_ids[first + 1 : end + 1]),
            anchor_id=sequence.token_ids[end],
            num_wanted=num_wanted if end == newest else 0,
            sampling=told.sampling,
            starts_cold=num_missing > 0,
        )

    def _slots(self, sequence: Sequence, first: int, end: int) -> LogicalSlots:
        return slots_of(sequence.pages, np.arange(first, end), self._page_size)


def _drawing(sampling: SamplingParams, completion: int) -> DraftSampling:
    """How the target draws, for a drafter that draws with the same noise."""
    assert sampling.seed is not None
    key = sampling_key(sampling.seed, completion)
    is_greedy = sampling.is_greedy or sampling.top_k == 1
    return DraftSampling(
        0.0 if is_greedy else sampling.temperature, key - (1 << 64) if key >= 1 << 63 else key
    )
