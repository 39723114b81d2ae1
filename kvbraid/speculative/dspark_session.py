"""DSpark at work: context rows go into the KV of every layer, one forward drafts a whole block.

Keys of the block lie behind the sequence's end and are overwritten by the next step, so rejected
drafts need no rollback.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from attention.kv_rows import on_device
from kvbraid.speculative.context_rows import SequenceRows, context_chunks
from kvbraid.speculative.draft_kv import DraftKv
from kvbraid.speculative.draft_sampler import DraftSampler
from kvbraid.speculative.draft_sequences import DraftSequence
from kvbraid.speculative.draft_session import Admitted
from kvbraid.speculative.proposal import Answer, DraftTask, Proposal

if TYPE_CHECKING:
    from kvbraid.speculative.dspark import DSparkDrafter


class DSparkSession:
    """Implements `DraftSession`."""

    def __init__(self, drafter: DSparkDrafter, kv: DraftKv) -> None:
        self._drafter = drafter
        self._kv = kv

    @property
    def num_scratch_rows(self) -> int:
        """See DraftSession: the block."""
        return self._drafter.config.block_size

    def complete(self, task: DraftTask, sequence: DraftSequence) -> DraftTask | Answer:
        """See DraftSession: nothing is needed, not even context."""
        return task

    def run(self, admitted: Sequence[Admitted]) -> list[Proposal]:
        """See DraftSession."""
        parts = [SequenceRows(a.sequence, a.task.first_position, a.task.rows) for a in admitted]
        for chunk in context_chunks(parts, self._kv, self._drafter.dtype):
            keys = self._drafter.key_rows(chunk.rows, chunk.positions)
            for layer, rows in enumerate(keys):
                self._kv.pool.write(layer, chunk.write_plan, *rows)
        drafting = [item for item in admitted if item.task.num_wanted > 0]
        proposals = iter(self._propose(drafting) if drafting else ())
        return [next(proposals) if a.task.num_wanted > 0 else Proposal() for a in admitted]

    def _propose(self, drafting: Sequence[Admitted]) -> list[Proposal]:
        tasks = [a.task for a in drafting]
        config = self._drafter.config
        num_drafts = min(max(task.num_wanted for task in tasks), config.max_draft_tokens)
        first = 0 if config.predicts_from_anchor else 1
        # Every slot sees the whole block, so it is computed whole whatever is wanted of it.
        hidden = self._forward_blocks(drafting)[:, first : first + num_drafts]
        sampler = DraftSampler(tasks, self._drafter.vocabulary, self._kv.device)
        drafts, embedded = self._draw(tasks, hidden, sampler)
        confidences = self._drafter.confidences(hidden, embedded)
        ids = drafts.tolist()
        levels = [[]] * len(tasks) if confidences is None else confidences.tolist()
        return [
            Proposal(
                tuple(ids[i][: task.num_wanted]),
                tuple(levels[i][: task.num_wanted]),
                laws=sampler.laws(task, i),
            )
            for i, task in enumerate(tasks)
        ]

    def _forward_blocks(self, drafting: Sequence[Admitted]) -> Tensor:
        """[B, S, d] after the final norm. The anchor is at its own position, not one later."""
        config, device = self._drafter.config, self._kv.device
        size = config.block_size
        anchors = np.array([a.task.anchor_position for a in drafting])
        lengths = anchors - np.array([a.sequence.base for a in drafting]) + size
        step = self._kv.plan_step(np.array([a.sequence.slot for a in drafting]), lengths)
        token_ids = np.full((len(drafting), size), config.mask_token_id)
        token_ids[:, 0] = [a.task.anchor_id for a in drafting]
        positions = anchors[:, None] + np.arange(size)
        hidden = self._drafter.forward(
            on_device(token_ids.ravel(), device),
            on_device(positions.ravel(), device),
            step,
        )
        return hidden.view(len(drafting), size, -1)

    def _draw(
        self, tasks: Sequence[DraftTask], hidden: Tensor, sampler: DraftSampler
    ) -> tuple[Tensor, Tensor]:
        """hidden [B, k, d] of the drafts' slots -> drafts, int64 [B, k], and markov_w1 of the
        token before each, [B, k, r]."""
        drafter, device = self._drafter, self._kv.device
        batch_size, num_drafts, _ = hidden.shape
        logits = drafter.logits(hidden.flatten(0, 1)).view(batch_size, num_drafts, -1)
        head = drafter.markov_head
        cell = head.new_cell()
        token_ids = on_device(np.array([task.anchor_id for task in tasks]), device)
        drafts, embedded = [], []
        for draft in range(num_drafts):
            before = head.embed(token_ids)
            scores = head.bias(cell.latent(hidden[:, draft], before)).add_(logits[:, draft])
            token_ids = drafter.vocabulary.target_ids(sampler.choose(scores, draft))
            drafts.append(token_ids)
            embedded.append(before)
        return torch.stack(drafts, 1), torch.stack(embedded, 1)
