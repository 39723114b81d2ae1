"""EAGLE3 at work: what it needs of each sequence before a step, and keeps for the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvbraid.speculative.draft_forward import DraftForward
from kvbraid.speculative.draft_sequences import DraftSequence
from kvbraid.speculative.draft_session import Admitted, ingest_and_draft
from kvbraid.speculative.eagle3_compute import Eagle3Compute
from kvbraid.speculative.proposal import Answer, DraftTask, Proposal, Resync


class Eagle3Session:
    """Implements `DraftSession`. Knows whose newest fused row `Eagle3Compute` keeps."""

    def __init__(self, compute: Eagle3Compute, forward: DraftForward, max_sequences: int) -> None:
        self._compute = compute
        self._forward = forward
        self._newest_positions = np.full(max_sequences, -1, dtype=np.int64)

    @property
    def num_scratch_rows(self) -> int:
        """See DraftSession: every draft but the last is fed back."""
        return self._compute.config.max_draft_tokens - 1

    def complete(self, task: DraftTask, sequence: DraftSequence) -> DraftTask | Answer:
        """See DraftSession. Without rows, the newest one held is extended with the anchor."""
        if task.next_token_ids:
            return task
        newest = sequence.end - 1
        if newest < sequence.base:
            return Proposal()
        if self._newest_positions[sequence.slot] != newest:
            return Resync(newest)
        return replace(
            task,
            first_position=newest,
            rows=self._compute.newest_row(sequence.slot),
            next_token_ids=(task.anchor_id,),
        )

    def run(self, admitted: Sequence[Admitted]) -> list[Proposal]:
        """See DraftSession."""
        slots = [item.sequence.slot for item in admitted]
        self._newest_positions[slots] = [item.task.anchor_position - 1 for item in admitted]
        return ingest_and_draft(self._forward, admitted)
