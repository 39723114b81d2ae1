"""How likely drafts are accepted: from the drafter's confidences, or from what was accepted so far.

A slot teaches only when it was reached, i.e. when all drafts before it were accepted; so all rates
are conditional ones. Counts fade, so memory and lag are bounded: by half in some 180 windows for
what all sequences share, in some 17 for one sequence.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_SHARED_MEMORY = 256
_SEQUENCE_MEMORY = 24
# Acceptance assumed of a new drafter, in so many windows.
_INITIAL_RATE = 0.75
_INITIAL_WINDOWS = 8.0
# Windows that the shared estimate counts for in a new sequence's.
_PRIOR_WINDOWS = 4.0
_NUM_BINS = 16
# Observations of a bin that outweigh the confidence as it came.
_BIN_PRIOR = 12.0
_REBUILD_WINDOWS = 32


class Reached:
    """What verified windows say about their slots.

    was_tested: bool [B, g], the slot had a draft and all before it were accepted. was_accepted:
    bool [B, g].
    """

    def __init__(self, num_verified: IntArray, num_accepted: IntArray, max_drafts: int) -> None:
        slots = np.arange(max_drafts)[None, :]
        self.was_accepted = slots < num_accepted[:, None]
        self.was_tested = slots < np.minimum(num_accepted + 1, num_verified)[:, None]


class AcceptanceRates:
    """Acceptance by position: one estimate shared by all sequences, one for each of them.

    A sequence holds a slot between `open` and `close`; its estimate starts as the shared one.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens
        self._shared_tested = np.full(max_draft_tokens, _INITIAL_WINDOWS)
        self._shared_accepted = self._shared_tested * _INITIAL_RATE
        self._tested = np.zeros((0, max_draft_tokens))
        self._accepted = np.zeros((0, max_draft_tokens))
        # Windows that the shared estimate counts for; they fade like the sequence's own.
        self._prior = np.zeros((0, max_draft_tokens))
        self._free: list[int] = []

    def open(self) -> int:
        """A slot for a new sequence."""
        if not self._free:
            size = len(self._tested)
            more = np.zeros((max(8, size), self.max_draft_tokens))
            self._tested = np.concatenate((self._tested, more))
            self._accepted = np.concatenate((self._accepted, more))
            self._prior = np.concatenate((self._prior, more))
            self._free.extend(range(len(self._tested) - 1, size - 1, -1))
        slot = self._free.pop()
        self._tested[slot] = self._accepted[slot] = 0.0
        self._prior[slot] = _PRIOR_WINDOWS
        return slot

    def close(self, slot: int) -> None:
        """The sequence has ended. Raises ValueError for a slot that is not open."""
        if slot in self._free or not 0 <= slot < len(self._tested):
            raise ValueError(f"slot {slot} is not open")
        self._free.append(slot)

    @property
    def shared(self) -> FloatArray:
        """The estimate for a sequence of which nothing is known, [g]."""
        shared: FloatArray = self._shared_accepted / self._shared_tested
        return shared

    def rates(self, slots: IntArray) -> FloatArray:
        """Chance of each draft, given that those before are accepted: [B, g]."""
        prior = self._prior[slots]
        accepted: FloatArray = prior * self.shared + self._accepted[slots]
        rates: FloatArray = accepted / (prior + self._tested[slots])
        return rates

    def observe(self, slots: IntArray, reached: Reached) -> None:
        """Windows of these sequences, one each."""
        tested = reached.was_tested.astype(np.float64)
        accepted = reached.was_accepted.astype(np.float64)
        kept = (1.0 - 1.0 / _SEQUENCE_MEMORY) ** tested
        self._prior[slots] *= kept
        self._tested[slots] = self._tested[slots] * kept + tested
        self._accepted[slots] = self._accepted[slots] * kept + accepted
        self.observe_shared(reached)

    def observe_shared(self, reached: Reached) -> None:
        """Windows of other sequences than those in slots."""
        num_tested = reached.was_tested.sum(axis=0, dtype=np.float64)
        num_accepted = reached.was_accepted.sum(axis=0, dtype=np.float64)
        kept = (1.0 - 1.0 / _SHARED_MEMORY) ** num_tested
        self._shared_tested = self._shared_tested * kept + num_tested
        self._shared_accepted = self._shared_accepted * kept + num_accepted

    def forget(self, slots: IntArray) -> None:
        """Keeps one window's worth of these sequences: what comes next counts more."""
        scale = np.minimum(1.0, 1.0 / np.maximum(self._tested[slots], 1.0))
        self._tested[slots] *= scale
        self._accepted[slots] *= scale

    def forget_shared(self) -> None:
        """Keeps two windows' worth of what all sequences share."""
        scale = np.minimum(1.0, 2.0 / self._shared_tested)
        self._shared_tested = self._shared_tested * scale
        self._shared_accepted = self._shared_accepted * scale


class ConfidenceCalibration:
    """Confidences of a drafter to chances of acceptance, by position, learned in use.

    Each position has 16 bins over [0, 1], each with a prior that takes the confidence at its word;
    between bin centres chances are interpolated, and they grow with the confidence.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self._positions = np.arange(max_draft_tokens)
        centres = (np.arange(_NUM_BINS) + 0.5) / _NUM_BINS
        self._tested = np.full((max_draft_tokens, _NUM_BINS), _BIN_PRIOR)
        self._accepted = self._tested * centres
        self._chances = self._monotone_chances()
        self._num_unused = 0

    def chances(self, confidences: FloatArray) -> FloatArray:
        """[B, g] confidences, any numbers (NaN counts as 0), to chances in (0, 1)."""
        at = _bounded(confidences) * _NUM_BINS - 0.5
        low = np.clip(at.astype(np.int64), 0, _NUM_BINS - 2)
        share = np.clip(at - low, 0.0, 1.0)
        below = self._chances[self._positions, low]
        return below + share * (self._chances[self._positions, low + 1] - below)

    def observe(self, confidences: FloatArray, reached: Reached) -> None:
        """Windows and the confidences that their drafts came with; both [B, g]."""
        bins = (_bounded(confidences) * _NUM_BINS).astype(np.int64).clip(max=_NUM_BINS - 1)
        cells = self._positions * _NUM_BINS + bins
        tested = self._sums(cells[reached.was_tested])
        kept = (1.0 - 1.0 / _SHARED_MEMORY) ** tested
        self._tested = self._tested * kept + tested
        self._accepted = self._accepted * kept + self._sums(cells[reached.was_accepted])
        self._num_unused += len(confidences)
        if self._num_unused >= _REBUILD_WINDOWS:
            self._num_unused = 0
            self._chances = self._monotone_chances()

    def _sums(self, cells: IntArray) -> FloatArray:
        sums = np.bincount(cells, minlength=self._tested.size)
        return sums.reshape(self._tested.shape).astype(np.float64)

    def _monotone_chances(self) -> FloatArray:
        """Mean of the least monotone curve above and the greatest below."""
        raw = self._accepted / self._tested
        above = np.maximum.accumulate(raw, axis=1)
        below = np.minimum.accumulate(raw[:, ::-1], axis=1)[:, ::-1]
        return (above + below) / 2.0


def _bounded(confidences: FloatArray) -> FloatArray:
    return np.clip(np.nan_to_num(confidences, nan=0.0, posinf=1.0, neginf=0.0), 0.0, 1.0)
