"""Drafts as many tokens as allowed in every step: for comparisons with a reference, and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvbraid.speculative.draft_plan import STEPS_BEFORE_PROBE, DraftPlan, StepOutcome

# Plain steps that need no plan.
_NUM_SAME = 15

PlainSeconds = Mapping[int, Sequence[float]]
"""Of steps without a plan, by the number of their sequences; see `Policy.skip`."""


def ignore(said: object) -> None:
    """Nothing is learnt."""


class FixedPolicy:
    """`DraftPolicy` without any judgement. Used by the engine thread."""

    def __init__(
        self,
        max_draft_tokens: int,
        observe: Callable[[StepOutcome], None] = ignore,
        observe_plain: Callable[[PlainSeconds], None] = ignore,
        steps_to_drafts: int = 0,
    ) -> None:
        """observe: gets every planned step; its slots are no other policy's. observe_plain: gets
        what steps without a plan took. steps_to_drafts: what it says of that."""
        self._max_draft_tokens = max_draft_tokens
        self._observe = observe
        self._observe_plain = observe_plain
        self._steps_to_drafts = steps_to_drafts
        self._num_opened = 0

    def steps_to_drafts(self, num_sequences: int) -> int:
        """See Policy."""
        return self._steps_to_drafts

    def expects_drafts(self) -> bool:
        """See Policy."""
        return self.steps_to_drafts(1) <= STEPS_BEFORE_PROBE

    def stays_plain(self, num_sequences: int) -> bool:
        """See Policy: never."""
        return False

    def open(self) -> int:
        """A number for a new sequence."""
        self._num_opened += 1
        return self._num_opened

    def close(self, slot: int) -> None:
        """Nothing is kept of a sequence."""

    def plan(self, slots: Sequence[int], limits: Sequence[int]) -> DraftPlan:
        """All that is allowed."""
        wanted = tuple(min(limit, self._max_draft_tokens) for limit in limits)
        most = max(wanted, default=0)
        return DraftPlan(wanted, 1 + most, num_same=0 if most else _NUM_SAME)

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
        """See Policy: it is told to `observe`."""
        self._observe(outcome)

    def skip(self, num_steps: int, seconds: PlainSeconds) -> None:
        """See Policy: it is told to `observe_plain`."""
        self._observe_plain(seconds)
