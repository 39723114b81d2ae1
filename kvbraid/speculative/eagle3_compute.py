"""EAGLE3 in a step: target rows replace drafted ones in its KV, then one forward a draft token.

The keys of a row follow from its inputs alone (there is one layer), so attention runs for the last
row of each sequence only. Keys of drafted tokens lie behind the sequence's end and are overwritten
by the target's rows in the next step: keeping them costs 8-15% of the acceptance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbraid.speculative.draft_compute import Anchors, Context, Drawn, Forwards, TokenChoice
from kvbraid.speculative.draft_kv import DraftKv, Int64Array

if TYPE_CHECKING:
    from kvbraid.speculative.eagle3 import Eagle3Drafter


class Eagle3Compute:
    """Implements `DraftCompute`. Keeps each sequence's newest fused row: drafting begins with it,
    and its key depends on the token after it, which may come later."""

    def __init__(self, drafter: Eagle3Drafter, kv: DraftKv) -> None:
        self._drafter = drafter
        self._pool = kv.pool
        self.config = drafter.config
        self.vocabulary = drafter.vocabulary
        self.dtype = drafter.dtype
        shape = (kv.spare_slot + 1, drafter.config.hidden_size)
        self._newest_rows = torch.zeros(shape, dtype=drafter.dtype, device=drafter.device)

    def newest_row(self, slot: int) -> Tensor:
        """[1, d], a copy: the row is written back to its place."""
        return self._newest_rows[slot, None].clone()

    def num_forwards(self, num_drafts: int) -> int:
        """See DraftCompute."""
        return num_drafts

    def first_lengths(self, num_rows: Int64Array) -> Int64Array:
        """See DraftCompute: the newest row is written again."""
        return num_rows

    def ingest(self, context: Context) -> None:
        """See DraftCompute."""
        keys = self._drafter.key_rows(context.rows, context.next_token_ids, context.positions)
        self._pool.write(0, context.write_plan, *keys)
        self._newest_rows.index_copy_(0, context.kept_slots, context.rows)

    def draft(
        self, anchors: Anchors, num_drafts: int, forwards: Forwards, choice: TokenChoice
    ) -> Drawn:
        """See DraftCompute."""
        features = self._newest_rows.index_select(0, anchors.slots)
        token_ids, first = anchors.token_ids, anchors.positions - 1
        drafts = []
        for draft in range(num_drafts):
            out = self._drafter.forward(features, token_ids, first + draft, forwards(draft))
            token_ids = self.vocabulary.target_ids(choice.choose(out.logits, draft))
            features = out.feature
            drafts.append(token_ids)
        return Drawn(torch.stack(drafts, dim=1), None)
