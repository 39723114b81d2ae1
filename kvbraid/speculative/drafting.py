"""The engine's door to its drafter, wherever that runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvbraid.speculative.proposal import Answer, DraftTask


class Drafting(Protocol):
    """Used by rank 0's engine thread only."""

    @property
    def max_draft_tokens(self) -> int:
        """Most drafts of one proposal."""
        ...

    def step(self, tasks: Sequence[DraftTask]) -> list[Answer | None]:
        """One answer a task, in order; None where none came in time or the drafter is away.

        Takes at most the configured timeout. Never raises for what a drafter does wrong: that is
        counted and the sequence decodes plainly.
        """
        ...

    def drop(self, key: str) -> None:
        """The sequence has ended; its state may go. An unknown key is ignored."""
        ...
