"""What the engine loop asks of speculation, and decoding without any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvbraid.engine.sequence import EngineRequest, Sequence
from kvbraid.engine.step_plan import StepPlan
from kvbraid.transport.draft_grant import DraftGrant


class VerifiedWindow(NamedTuple):
    """One sequence's part of a step: drafts that it got, of them verified, of them accepted."""

    num_proposed: int
    num_verified: int
    num_accepted: int


@dataclass(slots=True)
class SpeculationReport:
    """Figures of one step for metrics; times in seconds. plain: sequences that got no drafts, by
    reason. tap_s: part of verify_s."""

    windows: list[VerifiedWindow] = field(default_factory=list)
    plain: Counter[str] = field(default_factory=Counter)
    tap_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0


class Speculation(Protocol):
    """Rank 0's engine thread only."""

    @property
    def wants_taps(self) -> bool:
        """Whether the taps of the next step's tokens are to be kept."""
        ...

    @property
    def wants_prompt_taps(self) -> bool:
        """Whether they are if it computes prompts."""
        ...

    def open_grant(self, sequence: Sequence) -> DraftGrant | None:
        """Where another worker, which computes the prompt, pushes its rows; None: nowhere."""
        ...

    def queued(self, request: EngineRequest) -> None:
        """A request was accepted; its first step may be the next one."""
        ...

    def draft(self, active: Seq[Sequence]) -> None:
        """Put drafts on the sequences that decode in the next step."""
        ...

    def verified(self, plan: StepPlan, tokens: Mapping[int, Seq[int]], seconds: float) -> None:
        """The step is executed: its new tokens by engine slot, and what it took."""
        ...

    def meanwhile(self) -> None:
        """The next step is launched, its tokens are not there yet: time for what nobody waits
        for."""
        ...

    def drop(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        ...


class PlainDecoding:
    """No drafter."""

    wants_taps = wants_prompt_taps = False

    def open_grant(self, sequence: Sequence) -> DraftGrant | None:
        """Nowhere."""
        return None

    def queued(self, request: EngineRequest) -> None:
        """Nothing."""

    def draft(self, active: Seq[Sequence]) -> None:
        """Nothing."""

    def verified(self, plan: StepPlan, tokens: Mapping[int, Seq[int]], seconds: float) -> None:
        """Nothing."""

    def meanwhile(self) -> None:
        """Nothing."""

    def drop(self, sequence: Sequence) -> None:
        """Nothing."""
