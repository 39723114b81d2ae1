"""How drafts must be drawn for what verifies them; asked by rank 0 only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from kvbraid.engine.sampling_state import MIN_TEMPERATURE
from kvbraid.request import SamplingParams
from kvbraid.sampling_key import sampling_key
from kvbraid.speculative.proposal import DraftSampling, Proposal
from kvbraid.speculative.ratio_test import draft_key

WindowSampling = Callable[[int], DraftSampling]
"""Position of a window's anchor -> how its drafts are drawn."""


class DraftDrawing(Protocol):
    """The drafter's half of a verification."""

    def begin(self) -> None:
        """A new step is drafted for."""
        ...

    def open(self, sampling: SamplingParams, completion: int) -> WindowSampling:
        """How a sequence's windows are drawn, for as long as it runs."""
        ...

    def is_usable(self, slot: int, proposal: Proposal, drawn_as: DraftSampling) -> bool:
        """Keep what verification will need of this proposal for the sequence in `slot`; False
        where the drafts are of no use to it."""
        ...


class CoupledDrawing:
    """With the sampler's own noise: drafts agree with the target's sample more often. They may be
    drawn in any way, since only their being equal counts."""

    def begin(self) -> None:
        """Nothing is kept."""

    def open(self, sampling: SamplingParams, completion: int) -> WindowSampling:
        """See DraftDrawing. The same in every window: noise belongs to positions."""
        temperature, key = _temperature(sampling), _key(sampling, completion)
        coupled = DraftSampling(temperature, _signed(key))
        return lambda anchor_position: coupled

    def is_usable(self, slot: int, proposal: Proposal, drawn_as: DraftSampling) -> bool:
        """See DraftDrawing."""
        return True


class LawfulDrawing:
    """From the drafter's own law q, which comes with the drafts, with noise of each window's own.

    laws: float32 [k, V] by engine slot, of this step's sampled drafts. Greedy sequences have none:
    there p and q are point masses, and the ratio test is exact match.
    """

    def __init__(self) -> None:
        self.laws: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Slots may have new owners."""
        self.laws.clear()

    def open(self, sampling: SamplingParams, completion: int) -> WindowSampling:
        """See DraftDrawing."""
        temperature, key = _temperature(sampling), _key(sampling, completion)
        if temperature == 0.0:
            greedy = DraftSampling()
            return lambda anchor_position: greedy
        return lambda anchor_position: DraftSampling(
            temperature, _signed(draft_key(key, anchor_position)), wants_law=True
        )

    def is_usable(self, slot: int, proposal: Proposal, drawn_as: DraftSampling) -> bool:
        """See DraftDrawing. Drafts without their law, or with a damaged one, are of no use."""
        if not drawn_as.wants_law:
            return True
        laws = proposal.laws
        if laws is None or not bool(laws.isfinite().all()):
            return False
        self.laws[slot] = laws
        return True


def _temperature(sampling: SamplingParams) -> float:
    """0 for greedy; otherwise as the target's sampler has it."""
    if sampling.is_greedy or sampling.top_k == 1:
        return 0.0
    return max(sampling.temperature, MIN_TEMPERATURE)


def _key(sampling: SamplingParams, completion: int) -> int:
    assert sampling.seed is not None
    return sampling_key(sampling.seed, completion)


def _signed(key: int) -> int:
    return key - (1 << 64) if key >= 1 << 63 else key
