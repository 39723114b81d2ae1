"""DSpark in a step: context rows go into the KV of every layer, one forward computes a whole block.

Keys of the block lie behind the sequence's end and are overwritten by the next step, so rejected
drafts need no rollback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbraid.speculative.draft_compute import Anchors, Context, Drawn, Forwards, TokenChoice
from kvbraid.speculative.draft_kv import DraftKv, Int64Array

if TYPE_CHECKING:
    from kvbraid.speculative.dspark import DSparkDrafter


class DSparkCompute:
    """Implements `DraftCompute`. Keeps nothing beside the KV."""

    def __init__(self, drafter: DSparkDrafter, kv: DraftKv) -> None:
        self._drafter = drafter
        self._pool = kv.pool
        self.config = drafter.config
        self.vocabulary = drafter.vocabulary
        self.dtype = drafter.dtype
        self._offsets = torch.arange(drafter.config.block_size, device=drafter.device)

    def num_forwards(self, num_drafts: int) -> int:
        """See DraftCompute."""
        return 1

    def first_lengths(self, num_rows: Int64Array) -> Int64Array:
        """See DraftCompute: the block is behind the rows."""
        return num_rows + self.config.block_size

    def ingest(self, context: Context) -> None:
        """See DraftCompute."""
        keys = self._drafter.key_rows(context.rows, context.positions)
        for layer, rows in enumerate(keys):
            self._pool.write(layer, context.write_plan, *rows)

    def draft(
        self, anchors: Anchors, num_drafts: int, forwards: Forwards, choice: TokenChoice
    ) -> Drawn:
        """See DraftCompute. Every slot sees the whole block, so it is computed whole whatever is
        wanted of it."""
        first = 0 if self.config.predicts_from_anchor else 1
        hidden = self._blocks(anchors, forwards)[:, first : first + num_drafts]
        drafts, embedded = self._draw(anchors.token_ids, hidden, choice)
        return Drawn(drafts, self._drafter.confidences(hidden, embedded))

    def _blocks(self, anchors: Anchors, forwards: Forwards) -> Tensor:
        """[B, S, d] after the final norm. The anchor is at its own position, not one later."""
        shape = (len(anchors.token_ids), self.config.block_size)
        token_ids = torch.full(
            shape, self.config.mask_token_id, dtype=torch.int64, device=self._offsets.device
        )
        token_ids[:, 0] = anchors.token_ids
        positions = anchors.positions[:, None] + self._offsets
        hidden = self._drafter.forward(token_ids.flatten(), positions.flatten(), forwards(0))
        return hidden.view(*shape, -1)

    def _draw(
        self, token_ids: Tensor, hidden: Tensor, choice: TokenChoice
    ) -> tuple[Tensor, Tensor]:
        """token_ids: int64 [B], the anchors; hidden: [B, k, d] of the drafts' slots -> drafts,
        int64 [B, k], and markov_w1 of the token before each, [B, k, r]."""
        drafter = self._drafter
        batch_size, num_drafts, _ = hidden.shape
        logits = drafter.logits(hidden.flatten(0, 1)).view(batch_size, num_drafts, -1)
        head = drafter.markov_head
        cell = head.new_cell()
        drafts, embedded = [], []
        for draft in range(num_drafts):
            before = head.embed(token_ids)
            scores = head.bias(cell.latent(hidden[:, draft], before)).add_(logits[:, draft])
            token_ids = drafter.vocabulary.target_ids(choice.choose(scores, draft))
            drafts.append(token_ids)
            embedded.append(before)
        return torch.stack(drafts, 1), torch.stack(embedded, 1)
