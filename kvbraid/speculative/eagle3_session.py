"""EAGLE3 at work: target rows replace drafted ones in its KV, then one forward a draft token.

The keys of a row follow from its inputs alone (there is one layer), so attention runs for the last
row of each sequence only. Keys of drafted tokens lie behind the sequence's end and are overwritten
by the target's rows in the next step: keeping them costs 8-15% of the acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from attention.kv_rows import on_device
from kvbraid.speculative.context_rows import SequenceRows, context_chunks, join_rows
from kvbraid.speculative.draft_kv import DraftKv
from kvbraid.speculative.draft_sampler import DraftSampler
from kvbraid.speculative.draft_sequences import DraftSequence
from kvbraid.speculative.draft_session import Admitted
from kvbraid.speculative.proposal import Answer, DraftTask, Proposal, Resync

if TYPE_CHECKING:
    from kvbraid.speculative.eagle3 import Eagle3Drafter


class Eagle3Session:
    """Implements `DraftSession`. Keeps each sequence's newest fused row, because the key of that
    row depends on the token after it, which may come later."""

    def __init__(self, drafter: Eagle3Drafter, kv: DraftKv, max_sequences: int) -> None:
        self._drafter = drafter
        self._kv = kv
        width = drafter.config.hidden_size
        self._newest_rows = torch.zeros(
            max_sequences, width, dtype=drafter.dtype, device=drafter.device
        )
        self._newest_positions = np.full(max_sequences, -1, dtype=np.int64)

    @property
    def num_scratch_rows(self) -> int:
        """See DraftSession: every draft but the last is fed back."""
        return self._drafter.config.max_draft_tokens - 1

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
            # A copy: the row is written back to its place.
            rows=self._newest_rows[sequence.slot, None].clone(),
            next_token_ids=(task.anchor_id,),
        )

    def run(self, admitted: Sequence[Admitted]) -> list[Proposal]:
        """See DraftSession."""
        self._ingest(admitted)
        self._keep_newest(admitted)
        drafting = [item for item in admitted if item.task.num_wanted > 0]
        proposals = iter(self._propose(drafting) if drafting else ())
        return [next(proposals) if a.task.num_wanted > 0 else Proposal() for a in admitted]

    def _ingest(self, admitted: Sequence[Admitted]) -> None:
        """Write the keys of all rows but those with which drafting begins."""
        counts = [len(a.task.next_token_ids) - (a.task.num_wanted > 0) for a in admitted]
        parts = [
            SequenceRows(a.sequence, a.task.first_position, a.task.rows[:count])
            for a, count in zip(admitted, counts, strict=True)
        ]
        ids = chain.from_iterable(
            a.task.next_token_ids[:count] for a, count in zip(admitted, counts, strict=True)
        )
        token_ids = on_device(np.fromiter(ids, np.int64), self._kv.device)
        for chunk in context_chunks(parts, self._kv, self._drafter.dtype):
            keys = self._drafter.key_rows(chunk.rows, token_ids[chunk.span], chunk.positions)
            self._kv.pool.write(0, chunk.write_plan, *keys)

    def _keep_newest(self, admitted: Sequence[Admitted]) -> None:
        slots = np.array([a.sequence.slot for a in admitted])
        newest, kept = join_rows([a.task.rows[-1:] for a in admitted]), self._newest_rows
        newest = newest.to(kept.device, kept.dtype, non_blocking=True)
        kept.index_copy_(0, on_device(slots, kept.device), newest)
        self._newest_positions[slots] = [a.task.anchor_position - 1 for a in admitted]

    def _propose(self, drafting: Sequence[Admitted]) -> list[Proposal]:
        tasks = [a.task for a in drafting]
        device = self._kv.device
        slots = np.array([a.sequence.slot for a in drafting])
        anchors = np.array([task.anchor_position for task in tasks])
        lengths = anchors - np.array([a.sequence.base for a in drafting])
        num_drafts = min(
            max(task.num_wanted for task in tasks), self._drafter.config.max_draft_tokens
        )
        sampler = DraftSampler(tasks, self._drafter.vocabulary, device)
        features = self._newest_rows[on_device(slots, device)]
        token_ids = on_device(np.array([task.next_token_ids[-1] for task in tasks]), device)
        positions = on_device(anchors - 1, device)
        drafts = []
        for draft in range(num_drafts):
            step = self._kv.plan_step(slots, lengths + draft)
            out = self._drafter.forward(features, token_ids, positions + draft, step)
            token_ids = self._drafter.vocabulary.target_ids(sampler.choose(out.logits, draft))
            features = out.feature
            drafts.append(token_ids)
        rows = torch.stack(drafts, dim=1).tolist()
        return [
            Proposal(tuple(ids[: task.num_wanted]), laws=sampler.laws(task, row))
            for row, (task, ids) in enumerate(zip(tasks, rows, strict=True))
        ]
