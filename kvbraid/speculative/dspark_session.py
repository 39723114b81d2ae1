"""DSpark at work: what it needs of each sequence before a step."""

from __future__ import annotations

from collections.abc import Sequence

from kvbraid.speculative.draft_forward import DraftForward
from kvbraid.speculative.draft_sequences import DraftSequence
from kvbraid.speculative.draft_session import Admitted, ingest_and_draft
from kvbraid.speculative.drafter_config import DSparkConfig
from kvbraid.speculative.proposal import Answer, DraftTask, Proposal


class DSparkSession:
    """Implements `DraftSession`."""

    def __init__(self, config: DSparkConfig, forward: DraftForward) -> None:
        self._config = config
        self._forward = forward

    @property
    def num_scratch_rows(self) -> int:
        """See DraftSession: the block."""
        return self._config.block_size

    def complete(self, task: DraftTask, sequence: DraftSequence) -> DraftTask | Answer:
        """See DraftSession: nothing is needed, not even context."""
        return task

    def run(self, admitted: Sequence[Admitted]) -> list[Proposal]:
        """See DraftSession."""
        return ingest_and_draft(self._forward, admitted)
