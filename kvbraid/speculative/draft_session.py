"""What the proposer asks of a kind of drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvbraid.speculative.draft_sequences import DraftSequence
from kvbraid.speculative.proposal import Answer, DraftTask, Proposal

if TYPE_CHECKING:
    from kvbraid.speculative.draft_forward import DraftForward


class Admitted(NamedTuple):
    """A task of this step and its sequence, which holds what comes before the task's rows and has
    pages for them and for the session's scratch rows."""

    task: DraftTask
    sequence: DraftSequence


class DraftSession(Protocol):
    """A drafter at work on one KV; keeps per-sequence state beside it, by the sequence's slot."""

    @property
    def num_scratch_rows(self) -> int:
        """Rows behind the anchor's position that a proposal writes and nobody reads later."""
        ...

    def complete(self, task: DraftTask, sequence: DraftSequence) -> DraftTask | Answer:
        """The task with every row that it needs to propose, or the answer where one is missing."""
        ...

    def run(self, admitted: Sequence[Admitted]) -> list[Proposal]:
        """Ingest the rows of all tasks, then draft for those that want drafts; one proposal a
        task, in order."""
        ...


def ingest_and_draft(forward: DraftForward, admitted: Sequence[Admitted]) -> list[Proposal]:
    """See DraftSession.run: what is the same for all kinds."""
    forward.ingest(admitted)
    drafting = [item for item in admitted if item.task.num_wanted > 0]
    proposals = iter(forward.draft(drafting) if drafting else ())
    return [next(proposals) if a.task.num_wanted > 0 else Proposal() for a in admitted]
