"""What a step is to draft, what came of it, and who decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvbraid.speculative.break_even import PlainReason

# While drafting does not pay, rows are kept from so many steps before a probe on only.
STEPS_BEFORE_PROBE = 64


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """num_wanted: drafts to ask for, one number a sequence. width: of the verify window they are
    meant for. is_trial: the window is run at that width to learn, whatever is expected of it.
    reason: why nothing is asked for. num_same: so many steps more of the same sequences, or of such
    as `Policy.stays_plain` says, may do without drafts before the policy is asked again; it is told
    how many did by `Policy.skip`."""

    num_wanted: tuple[int, ...]
    width: int
    is_trial: bool = False
    reason: PlainReason | None = None
    num_same: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """An executed step. slots: all its sequences. width: rows of each. num_verified,
    num_accepted: drafts of each sequence in the window, and those accepted. confidences: of its
    drafts, empty where the drafter gave none. num_asked: most drafts asked of one sequence, 0 if
    none. num_drafting: sequences that drafts were asked for. draft_seconds: what asking took, 0 if
    nothing was asked. told_prompts: with it the drafter was told prompts, which takes it longer.
    step_seconds: the rest of the step, up to the next one's beginning where that is of the same
    sequences. has_prompt_rows: the step also computed prompts, so that its time says nothing.
    has_transfers: rows of prompts were on their way from another worker, which slows any step.
    reason: the plan's."""

    slots: Sequence[int]
    width: int
    num_verified: Sequence[int]
    num_accepted: Sequence[int]
    confidences: Sequence[Sequence[float]]
    num_asked: int
    num_drafting: int
    draft_seconds: float
    step_seconds: float
    has_prompt_rows: bool
    has_transfers: bool = False
    told_prompts: bool = False
    reason: PlainReason | None = None


class Policy(Protocol):
    """Decides how much is drafted and verified; `kvbraid.speculative.draft_policy.DraftPolicy`."""

    def steps_to_drafts(self, num_sequences: int) -> int:
        """Steps in which no drafts will be asked for; 0 where they may be soon, were there so many
        sequences and all of them new."""
        ...

    def expects_drafts(self) -> bool:
        """Whether the sequences of the last plan may be drafted for within STEPS_BEFORE_PROBE
        steps, should no others come."""
        ...

    def stays_plain(self, num_sequences: int) -> bool:
        """Whether what the last plan allows goes for a step of so many sequences, whichever."""
        ...

    def open(self) -> int:
        """A number for a new sequence."""
        ...

    def close(self, slot: int) -> None:
        """The sequence has ended."""
        ...

    def plan(self, slots: Sequence[int], limits: Sequence[int]) -> DraftPlan:
        """What to ask the drafter for; limits: most drafts of each sequence."""
        ...

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
        """Rows of each sequence in the verify step."""
        ...

    def record(self, outcome: StepOutcome) -> None:
        """Learn from an executed step."""
        ...

    def skip(self, num_steps: int, seconds: Mapping[int, Sequence[float]]) -> None:
        """So many plain steps were run without asking, after the last plan and within what it
        allowed. seconds: of those whose time says something, by the number of their sequences."""
        ...
