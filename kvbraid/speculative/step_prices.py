"""What steps cost, plain and drafted: learnt from those that ran, told of whole steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbraid.speculative.cost_table import CostTable
from kvbraid.speculative.draft_plan import StepOutcome

FloatArray = NDArray[np.float64]

# Steps without a plan that measure a plain step's price.
NUM_MEASURED = 3
# What takes longer than this times its bound was a pause of the machine and says nothing.
_PAUSE = 1.5
_DRAFT_PAUSE = 4.0  # of drafting, which varies more
# A coarse clock may not have advanced.
_CLOCK_TICK = 1e-9


class StepCost(NamedTuple):
    """In plain steps. entry: what telling the drafter prompts took, which `whole` is without."""

    whole: float
    entry: float


class StepPrices:
    """drafts_in_blocks: the drafter computes all its drafts at once, so fewer cost the same."""

    def __init__(self, max_draft_tokens: int, *, drafts_in_blocks: bool) -> None:
        self.costs = CostTable(max_draft_tokens)
        self._max_draft_tokens = max_draft_tokens
        self._drafts_in_blocks = drafts_in_blocks

    def observe(self, outcome: StepOutcome) -> None:
        """A planned step. One that asked for drafts and verified none is no plain one: what it
        took beside them says nothing of what a step without a plan takes."""
        if outcome.num_asked > 0:
            seconds = max(outcome.draft_seconds, _CLOCK_TICK)
            asked = self.asked_as(outcome.num_asked)
            if outcome.told_prompts:
                self.costs.first_draft.observe(outcome.num_drafting, 1, seconds)
            else:
                self.costs.draft.observe(outcome.num_drafting, asked, seconds)
            if outcome.width == 1:
                return
        self.costs.observe_step(
            len(outcome.slots),
            outcome.width,
            max(outcome.step_seconds, _CLOCK_TICK),
            has_prompt_rows=outcome.has_prompt_rows,
        )

    def observe_plain(self, seconds: Mapping[int, Sequence[float]]) -> None:
        """Steps without a plan, by the number of their sequences."""
        for size, found in seconds.items():
            typical = max(statistics.median(found), _CLOCK_TICK)
            for _ in found[:NUM_MEASURED]:
                self.costs.observe_step(size, 1, typical, has_prompt_rows=False)

    def cost(self, outcome: StepOutcome) -> StepCost | None:
        """Of a step, a pause of the machine left out; None where it cannot be compared. What
        transfers beside it took is not held against drafting: plain steps would have met them as
        well, and more often."""
        size = len(outcome.slots)
        plain = self.costs.plain_seconds(size)
        if plain is None or outcome.has_prompt_rows:
            return None
        if outcome.width == 1 and outcome.num_asked == 0:
            return StepCost(1.0, 0.0)
        step = self.costs.step.seconds(size)
        assert step is not None
        pause, draft_pause = (1.0, 1.0) if outcome.has_transfers else (_PAUSE, _DRAFT_PAUSE)
        seconds = min(outcome.step_seconds, pause * float(step[outcome.width - 1]))
        if outcome.num_asked == 0:
            return StepCost(seconds / plain, 0.0)
        draft = self.costs.draft.seconds(outcome.num_drafting)
        if draft is None:
            draft_pause = _DRAFT_PAUSE
        usual = plain if draft is None else float(draft[self.asked_as(outcome.num_asked) - 1])
        if not outcome.told_prompts:
            seconds += min(outcome.draft_seconds, draft_pause * usual)
            return StepCost(seconds / plain, 0.0)
        first = self.costs.first_draft.seconds(outcome.num_drafting)
        # The very first one takes as long as its prompts are.
        longest = math.inf if first is None else draft_pause * float(first[0])
        taken = min(outcome.draft_seconds, longest)
        return StepCost((seconds + min(taken, usual)) / plain, max(0.0, taken - usual) / plain)

    def first_draft_price(self, size: int) -> float:
        """Plain steps that a first drafting for so many sequences takes, about; 0 where nothing
        is known."""
        plain, first = self.costs.plain_seconds(size), self.costs.first_draft.seconds(size)
        return 0.0 if plain is None or first is None else float(first[0]) / plain

    def asked_as(self, num_drafts: int) -> int:
        """The number of drafts that these cost as much as."""
        return self._max_draft_tokens if self._drafts_in_blocks else num_drafts

    def whole_steps(self, size: int) -> tuple[FloatArray, FloatArray]:
        """Seconds with drafting by width, as estimated and bounded from below: two of [g + 1]."""
        step = self.costs.step.seconds(size)
        assert step is not None
        draft = self.costs.draft.seconds(size)
        if draft is None:
            # Nothing is known: as dear as a step.
            draft = np.full(self._max_draft_tokens, step[0])
        return (
            self._whole_step(step, draft),
            self._whole_step(self.costs.step.hopeful(size), self.costs.draft.hopeful(size)),
        )

    def draft_share(self, size: int) -> FloatArray:
        """Seconds that drafting for one sequence more takes, of so many, by width: [g + 1]. Where
        drafting for one was never measured, its part of the whole."""
        share = np.zeros(self._max_draft_tokens + 1)
        if size > 1:
            of_all, of_one = self.costs.draft.hopeful(size), self.costs.draft.hopeful(1)
            more = (of_all - np.minimum(of_one, of_all)) / (size - 1)
            share[1:] = more[-1] if self._drafts_in_blocks else more
        return share

    def _whole_step(self, step: FloatArray, draft: FloatArray) -> FloatArray:
        seconds = step.copy()
        seconds[1:] += draft[-1] if self._drafts_in_blocks else draft
        return seconds
