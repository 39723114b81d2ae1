"""Whether and how much a worker drafts and verifies: cost table, acceptance and break-even put
together. Used by rank 0's engine thread; deterministic given its inputs.

A step is three calls: `plan` before the drafter is asked, `width` when its answers are there,
`record` when the step has run. While speculation is off, most steps are none at all: their number
is told afterwards, by `skip`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbraid.speculative.break_even import BreakEven, PlainReason, RequestGates, Verdict
from kvbraid.speculative.calibration import AcceptanceRates, ConfidenceCalibration, Reached
from kvbraid.speculative.cost_table import bucket_of
from kvbraid.speculative.draft_plan import STEPS_BEFORE_PROBE, DraftPlan, StepOutcome
from kvbraid.speculative.step_prices import NUM_MEASURED, StepPrices
from kvbraid.speculative.verify_budget import WidthRule, expected_tokens, request_gains, within

__all__ = ["DraftPlan", "DraftPolicy", "StepOutcome"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

# A plain step's price is refreshed after so many steps of its batch size with drafts.
_REFRESH_STEPS = 256
# While off and with the same sequences, estimates are looked at again this often: the less so the
# further away the next probe is.
_REVIEW_STEPS = 16
_LONGEST_REVIEW_STEPS = 256
# "Never", as long as the requests stay what they are.
_NO_PROBE = 1 << 30
# An unmeasured width is tried when it may be better by this factor.
_WORTH_TRYING = 1.02
# What choosing a width takes: not worth it where no width is that much faster than another.
_RULE_SECONDS = 1.5e-4
# Acceptance of a drafter as good as one may hope: below break-even with this, no probe helps.
_HOPED_RATE = 0.9


class _Choice(NamedTuple):
    """A width and its expected rate over that of plain decoding."""

    width: int
    gain: float


class DraftPolicy:
    """max_draft_tokens: most drafts of a proposal. width_rule: `best_width` for exact match,
    `causal_width` for the ratio test. drafts_in_blocks: the drafter computes all its drafts at
    once (DSpark), so fewer cost the same."""

    def __init__(
        self, max_draft_tokens: int, *, width_rule: WidthRule, drafts_in_blocks: bool
    ) -> None:
        self.max_draft_tokens = max_draft_tokens
        self._prices = StepPrices(max_draft_tokens, drafts_in_blocks=drafts_in_blocks)
        self.costs = self._prices.costs
        self.rates = AcceptanceRates(max_draft_tokens)
        self.calibration = ConfidenceCalibration(max_draft_tokens)
        self.gates = RequestGates()
        self.break_even = BreakEven()
        self.plain_steps: Counter[PlainReason] = Counter()
        self._width_rule = width_rule
        self._last_reason = PlainReason.MEASURING
        self._may_probe = True
        # What is expected of drafting for new sequences, by `bucket_of` their number: until more is
        # learnt of drafts. What plain steps take meanwhile is seen by the next plan.
        self._gains_of_new: dict[int, float] = {}
        self._probe_price = self._entry_price = 0.0

    @property
    def is_drafting(self) -> bool:
        """Whether drafts are asked for as a rule, not only by probes."""
        return self.break_even.reason is None

    def steps_to_drafts(self, num_sequences: int) -> int:
        """See Policy. What has stopped drafting may be the last sequences' own: that there were
        more of them, their texts or that they ended soon."""
        return 0 if self._would_draft(num_sequences) else self._steps_to_probe()

    def expects_drafts(self) -> bool:
        """See Policy. Once they are found not to pay, they have to wait for a probe."""
        return self.is_drafting or self._steps_to_probe() <= STEPS_BEFORE_PROBE

    def _steps_to_probe(self) -> int:
        if not self._may_probe:
            return _NO_PROBE
        return self.break_even.steps_to_probe(self._probe_price, self._entry_price)

    def stays_plain(self, num_sequences: int) -> bool:
        """See Policy: while it is off, and so many new sequences would not turn it on."""
        if self.is_drafting or self.break_even.is_probing:
            return False
        return not self._would_draft(num_sequences)

    def open(self) -> int:
        """A slot for a new sequence."""
        slot = self.rates.open()
        self.gates.open(slot)
        return slot

    def close(self, slot: int) -> None:
        """The sequence has ended. Raises ValueError for a slot that is not open."""
        self.rates.close(slot)

    def plan(self, slots: Sequence[int], limits: Sequence[int]) -> DraftPlan:
        """What to ask of the drafter for the next step of these sequences.

        limits: most drafts of each: what is left of its tokens after the next one, of the context,
        and what the client allows; 0 for none.
        """
        size = len(slots)
        if not any(limits):
            # They only shrink.
            return self._plain(size, PlainReason.NOT_ALLOWED, num_same=_REVIEW_STEPS - 1)
        plain_seconds = self.costs.plain_seconds(size)
        if plain_seconds is None or self.costs.steps_since_plain(size) >= _REFRESH_STEPS:
            return self._plain(size, PlainReason.MEASURING, num_same=NUM_MEASURED)
        return self._estimate(np.array(slots), np.minimum(limits, self.max_draft_tokens))

    def width(
        self,
        plan: DraftPlan,
        slots: Sequence[int],
        *,
        limits: Sequence[int],
        num_drafts: Sequence[int],
        confidences: Sequence[Sequence[float]],
        draft_seconds: float,
    ) -> int:
        """Rows of each sequence in the verify step, at least 1 and at most 1 + its most drafts.

        plan: the one that these drafts were asked by. num_drafts: drafts at hand, at most the
        limit. confidences: one a draft, or none at all for a sequence. draft_seconds: what they
        took.
        """
        most = max(num_drafts, default=0)
        step = self.costs.step.seconds(len(slots))
        if most == 0 or step is None:
            return 1
        if plan.is_trial:
            return min(plan.width, most + 1)
        if step[most] - step[0] < _RULE_SECONDS:
            return most + 1
        rates = self.rates.rates(np.array(slots))
        offered = within(np.array(num_drafts), self.max_draft_tokens)
        acceptance = np.where(offered, self._chances(rates, confidences), 0.0)
        expected = np.where(within(np.array(limits), self.max_draft_tokens), rates, 0.0)
        width = self._width_rule(acceptance, expected, step + draft_seconds)
        return min(width, most + 1)

    def record(self, outcome: StepOutcome) -> None:
        """Learns from an executed step."""
        cost = self._prices.cost(outcome)
        is_plain = outcome.width == 1 and outcome.num_asked == 0
        if not is_plain:
            self._gains_of_new.clear()
        if not is_plain or outcome.reason is PlainReason.MEASURING:
            self._prices.observe(outcome)
        if outcome.width > 1:
            self._learn(outcome)
        if cost is not None:
            size = len(outcome.slots)
            emitted = size + sum(outcome.num_accepted)
            self.break_even.record(emitted, size, cost.whole, cost.entry)

    def skip(self, num_steps: int, seconds: Mapping[int, Sequence[float]]) -> None:
        """See Policy."""
        self._prices.observe_plain(seconds)
        self.plain_steps[self._last_reason] += num_steps
        self.break_even.skip(num_steps)

    def begin_serving(self) -> None:
        """What was learnt so far was learnt before anybody is served."""
        if self.costs.plain_seconds(1) is not None:
            self.break_even.trust(self._gain_of_new(1))

    def observe_acceptance(self, outcome: StepOutcome) -> None:
        """Learns which drafts of an executed step were accepted, as of sequences that are not in
        any slot here: what a worker generates before it serves."""
        self._gains_of_new.clear()
        if outcome.width > 1:
            self.rates.observe_shared(self._reached(outcome))

    def observe_seconds(self, outcome: StepOutcome) -> None:
        """Learns what a step took that ran before anybody is served, and nothing else of it."""
        self._gains_of_new.clear()
        self._prices.observe(outcome)

    def observe_plain(self, seconds: Mapping[int, Sequence[float]]) -> None:
        """Learns what steps without a plan took, see `skip`."""
        self._gains_of_new.clear()
        self._prices.observe_plain(seconds)

    def _learn(self, outcome: StepOutcome) -> None:
        reached = self._reached(outcome)
        self.rates.observe(np.array(outcome.slots), reached)
        given, has_confidence = self._ragged(outcome.confidences)
        if has_confidence.any():
            reached.was_tested &= has_confidence
            reached.was_accepted &= has_confidence
            self.calibration.observe(given, reached)

    def _reached(self, outcome: StepOutcome) -> Reached:
        return Reached(
            np.array(outcome.num_verified), np.array(outcome.num_accepted), self.max_draft_tokens
        )

    def _estimate(self, slots: IntArray, limits: IntArray) -> DraftPlan:
        likely, hopeful = self._prices.whole_steps(len(slots))
        rates = self.rates.rates(slots)
        has_room = within(limits, self.max_draft_tokens)
        each = self._prices.draft_share(len(slots))
        pays = self.gates.judge(slots, request_gains(rates, hopeful, each))
        expected = np.where(has_room & pays[:, None], rates, 0.0)
        choice = self._choose(expected, likely)
        if not self.break_even.is_probing:
            untried = self._untried_width(len(slots), expected, hopeful, choice, likely)
            if untried is not None:
                return self._drafts(untried, limits * pays, is_trial=True)
        if choice.gain <= 1.0 and self._lacks_only_room(
            np.where(pays[:, None], rates, 0.0), likely
        ):
            # No verdict on the drafter: these end soon.
            return self._plain(len(slots), PlainReason.NOT_ALLOWED, num_same=_REVIEW_STEPS - 1)
        was_probing = self.break_even.is_probing
        probe = self._probe_choice(has_room, likely)
        price = likely[probe.width - 1] / likely[0] - 1.0 if probe.width > 1 else None
        # While on it was not looked for.
        self._may_probe = self.is_drafting or price is not None
        self._probe_price = price or 0.0
        self._entry_price = self._prices.first_draft_price(len(slots))
        verdict = self.break_even.decide(
            choice.gain, price, len(slots), entry_price=self._entry_price
        )
        if verdict is Verdict.PROBE and probe.width > 1:
            if not was_probing:
                self.rates.forget_shared()
                self.rates.forget(slots)
            return self._drafts(probe.width, limits, is_trial=True)
        if verdict is Verdict.DRAFT:
            joins, begins = self.gates.join(slots)
            self.rates.forget(slots[begins])
            return self._drafts(choice.width, limits * (pays | joins))
        return self._plain(len(slots), self.break_even.reason, self._steps_without_review())

    def _lacks_only_room(self, expected: FloatArray, likely: FloatArray) -> bool:
        return self.is_drafting and self._choose(expected, likely).gain > 1.0

    def _would_draft(self, size: int) -> bool:
        """Whether so many new sequences would be drafted for; where nothing is known it depends on
        what may be lost."""
        if self.costs.plain_seconds(size) is None:
            return self.break_even.would_draft(math.inf)
        return self.break_even.would_draft(self._gain_of_new(size))

    def _gain_of_new(self, size: int) -> float:
        """Of sequences that are alike: as of one at the prices of so many."""
        bucket = bucket_of(size)
        gain = self._gains_of_new.get(bucket)
        if gain is None:
            likely, _ = self._prices.whole_steps(size)
            gain = self._gains_of_new[bucket] = self._choose(self.rates.shared[None], likely).gain
        return gain

    def _steps_without_review(self) -> int:
        """As many as there is nothing to decide in, up to where rows are kept for a probe."""
        if self.break_even.is_probing:
            return 0
        num_steps = self._steps_to_probe()
        if num_steps > STEPS_BEFORE_PROBE:
            num_steps -= STEPS_BEFORE_PROBE
        return min(max(_REVIEW_STEPS, num_steps), _LONGEST_REVIEW_STEPS) - 1

    def _choose(self, expected: FloatArray, seconds: FloatArray) -> _Choice:
        width = self._width_rule(expected, expected, seconds)
        rates = expected_tokens(expected) / seconds
        return _Choice(width, float(rates[width - 1] / rates[0]))

    def _probe_choice(self, has_room: BoolArray, likely: FloatArray) -> _Choice:
        if self.break_even.reason is None and not self.break_even.is_probing:
            # Not asked for while on: should this step be the one that stops, it is not the one
            # that probes.
            return _Choice(1, 1.0)
        return self._choose(np.where(has_room, _HOPED_RATE, 0.0), likely)

    def _untried_width(
        self,
        size: int,
        expected: FloatArray,
        hopeful: FloatArray,
        choice: _Choice,
        likely: FloatArray,
    ) -> int | None:
        """A width to measure: it may be better than what is known, and its price is covered."""
        if bool((hopeful >= likely).all()):
            return None  # all is measured
        best = self._choose(expected, hopeful)
        if best.gain <= choice.gain * _WORTH_TRYING or best.width == 1:
            return None
        known = max(1, self.costs.step.largest_measured(size))
        width = min(best.width, 2 * known)
        asked = self._prices.asked_as(width - 1)
        is_measured = self.costs.step.is_measured(size, width) and self.costs.draft.is_measured(
            size, asked
        )
        price = float(likely[width - 1] / likely[0]) - 1.0
        return None if is_measured or not self.break_even.can_afford(price) else width

    def _drafts(self, width: int, limits: IntArray, is_trial: bool = False) -> DraftPlan:
        wanted = tuple(np.minimum(limits, self._prices.asked_as(width - 1)).tolist())
        return DraftPlan(wanted, width, is_trial=is_trial)

    def _plain(self, size: int, reason: PlainReason | None, num_same: int = 0) -> DraftPlan:
        assert reason is not None
        self.plain_steps[reason] += 1
        self._last_reason = reason
        return DraftPlan((0,) * size, 1, reason=reason, num_same=num_same)

    def _chances(self, rates: FloatArray, confidences: Sequence[Sequence[float]]) -> FloatArray:
        given, has_confidence = self._ragged(confidences)
        if not has_confidence.any():
            return rates
        return np.where(has_confidence, self.calibration.chances(given), rates)

    def _ragged(self, confidences: Sequence[Sequence[float]]) -> tuple[FloatArray, BoolArray]:
        """[B, g] confidences and where there are any."""
        given = np.zeros((len(confidences), self.max_draft_tokens))
        has_any = np.zeros(given.shape, dtype=np.bool_)
        for row, values in enumerate(confidences):
            count = min(len(values), self.max_draft_tokens)
            given[row, :count] = values[:count]
            has_any[row, :count] = True
        return given, has_any
