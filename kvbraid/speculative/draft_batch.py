"""What one step drafts for, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbraid.speculative.draft_kv import Int64Array
from kvbraid.speculative.draft_session import Admitted
from kvbraid.speculative.proposal import DraftTask


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Sequences that want drafts, B of them.

    slots: of the KV. num_rows: held of each, int64 [B]. num_drafts: most that one wants.
    """

    tasks: tuple[DraftTask, ...]
    slots: Int64Array
    num_rows: Int64Array
    anchor_ids: Int64Array
    anchor_positions: Int64Array
    num_drafts: int

    @classmethod
    def of(cls, drafting: Sequence[Admitted], max_drafts: int) -> DraftBatch:
        """max_drafts: of one proposal."""
        tasks = tuple(item.task for item in drafting)
        positions = np.array([task.anchor_position for task in tasks])
        return cls(
            tasks=tasks,
            slots=np.array([item.sequence.slot for item in drafting]),
            num_rows=positions - np.array([item.sequence.base for item in drafting]),
            anchor_ids=np.array([task.anchor_id for task in tasks]),
            anchor_positions=positions,
            num_drafts=min(max(task.num_wanted for task in tasks), max_drafts),
        )

    def __len__(self) -> int:
        return len(self.tasks)
