"""Verification by exact match: a draft is accepted where it equals the target's own sample.

A window is the anchor and k drafts x_1..x_k; its k + 1 rows give the target's samples y_0..y_k.
What is emitted is y_0..y_a, always the target's: whatever the drafter says, the law of the output
is the target's, and with counter-based noise the very tokens are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class WindowOutcome(NamedTuple):
    """One verified window. num_proposed: drafts that had a row; num_accepted: the first of them."""

    num_proposed: int
    num_accepted: int

    @property
    def num_emitted(self) -> int:
        """Tokens of the window: the accepted drafts and one more that the target drew."""
        return self.num_accepted + 1


def usable_drafts(token_ids: Sequence[int], vocab_size: int) -> Sequence[int]:
    """The drafts before the first that is no token id, which must not reach an embedding."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            return token_ids[:index]
    return token_ids


def accepted_length(drafts: Sequence[int], samples: Sequence[int]) -> int:
    """How many drafts are accepted, a; the window emits samples[0] .. samples[a].

    drafts: any integers, any number of them; those without a row of their own are not accepted.
    samples: the target's, one a row, at least one; rows behind the drafts (padding) are ignored.
    A sample that is no token (its logits were not finite) must fail the request when its row is
    among the first a + 1; which token id stands in for it does not matter then.
    Raises ValueError when there is no sample.
    """
    if not samples:
        raise ValueError("a window has at least the anchor's row, got no samples")
    accepted = 0
    for draft, sample in zip(drafts, samples[:-1], strict=False):
        if draft != sample:
            break
        accepted += 1
    return accepted


def verify_by_match(drafts: Sequence[int], samples: Sequence[int]) -> WindowOutcome:
    """`accepted_length` and how many drafts were tested by the window, reached or not."""
    num_accepted = accepted_length(drafts, samples)
    return WindowOutcome(min(len(drafts), len(samples) - 1), num_accepted)


class AcceptanceCounts:
    """Totals of many windows, exact, for metrics and usage fields.

    num_proposed_by_position[i]: windows whose draft i (0-based) had a row.
    num_accepted_by_position[i]: those whose draft i was accepted, and all before it.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self.num_windows = 0
        self.num_proposed_by_position = [0] * max_draft_tokens
        self.num_accepted_by_position = [0] * max_draft_tokens

    def add(self, outcome: WindowOutcome) -> None:
        """Counts one window. Windows without drafts are plain steps: do not add them."""
        self.num_windows += 1
        for position in range(outcome.num_proposed):
            self.num_proposed_by_position[position] += 1
        for position in range(outcome.num_accepted):
            self.num_accepted_by_position[position] += 1

    @property
    def num_proposed(self) -> int:
        """Drafts that were verified."""
        return sum(self.num_proposed_by_position)

    @property
    def num_accepted(self) -> int:
        """Drafts that were emitted."""
        return sum(self.num_accepted_by_position)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted a window, the target's own one included; 1 when there was no window."""
        return 1.0 + self.num_accepted / self.num_windows if self.num_windows else 1.0
