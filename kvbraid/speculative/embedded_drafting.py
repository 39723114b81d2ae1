"""The drafter in the worker's own rank 0, between two steps of its engine thread."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvbraid.speculative.proposal import Answer, DraftTask
from kvbraid.speculative.proposer import Proposer


class EmbeddedDrafting:
    """See `kvbraid.speculative.drafting.Drafting`."""

    def __init__(self, proposer: Proposer, max_draft_tokens: int) -> None:
        """max_draft_tokens: at most the proposer's own."""
        self._proposer = proposer
        self.max_draft_tokens = min(max_draft_tokens, proposer.max_draft_tokens)

    def step(self, tasks: Sequence[DraftTask]) -> list[Answer | None]:
        """See Drafting."""
        return list(self._proposer.step(tasks))

    def open_grant(self, key: str, end_position: int) -> None:
        """Nothing takes rows of prompts that other workers compute: such a sequence starts cold."""

    def take_rows(self) -> None:
        """Nothing is pushed."""

    def await_rows(self, keys: Sequence[str]) -> Collection[str]:
        """Nothing is pushed, so nothing is late."""
        return ()

    def drop(self, key: str) -> None:
        """See Drafting."""
        self._proposer.drop(key)
