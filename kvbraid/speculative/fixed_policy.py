"""Drafts as many tokens as allowed in every step: for comparisons with a reference, and checks."""

from __future__ import annotations

from collections.abc import Sequence

from kvbraid.speculative.draft_policy import DraftPlan, StepOutcome


class FixedPolicy:
    """`DraftPolicy` without any judgement."""

    is_drafting = True
    steps_to_probe = 0

    def __init__(self, max_draft_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._num_opened = 0

    def open(self) -> int:
        """A number for a new sequence."""
        self._num_opened += 1
        return self._num_opened

    def close(self, slot: int) -> None:
        """Nothing is kept of a sequence."""

    def plan(self, slots: Sequence[int], limits: Sequence[int]) -> DraftPlan:
        """All that is allowed."""
        wanted = tuple(min(limit, self._max_draft_tokens) for limit in limits)
        return DraftPlan(wanted, 1 + max(wanted, default=0))

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
        """All that was drafted."""
        return 1 + max(num_drafts, default=0)

    def record(self, outcome: StepOutcome) -> None:
        """Nothing is learnt."""

    def skip(self, num_steps: int) -> None:
        """Its plans allow none."""
