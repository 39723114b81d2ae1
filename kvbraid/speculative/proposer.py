"""Drafts for many sequences at once: commit, ingest, propose. Knows no wire and no engine.

The same object runs embedded in rank 0 of a decode worker and in the draft service.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from attention.dispatch import choose
from kvbraid.speculative.draft_graphs import DraftGraphs
from kvbraid.speculative.draft_kv import DraftKv
from kvbraid.speculative.draft_sequences import DraftSequences
from kvbraid.speculative.draft_session import Admitted
from kvbraid.speculative.drafter import Drafter
from kvbraid.speculative.proposal import Answer, DraftTask, Proposal

DEFAULT_PAGE_SIZE = 16


class Proposer:
    """One drafter, its KV and the sequences that it holds. Used by one thread.

    Steps are idempotent: rows replace whatever is held from their first position on. When the KV
    is full, sequences outside the step are evicted, the least recently used first; their next task
    is answered with Resync(0) unless it starts cold.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        num_kv_tokens: int,
        max_sequences: int,
        page_size: int = DEFAULT_PAGE_SIZE,
        graphs: DraftGraphs | None = None,
    ) -> None:
        """num_kv_tokens: rows that the KV has room for; page_size: rows of a page. graphs: to
        capture steps with; every kernel is launched anew without.

        Raises ConfigError for impossible sizes or where no attention backend serves the drafter.
        """
        self.config = drafter.config
        self.max_sequences = max_sequences
        kv = DraftKv(
            drafter.config,
            window=drafter.window,
            num_kv_tokens=num_kv_tokens,
            max_sequences=max_sequences,
            page_size=page_size,
            dtype=drafter.dtype,
            device=drafter.device,
            attention_for=choose if graphs is None else graphs.attention_for,
        )
        self.kv = kv
        self._sequences = DraftSequences(kv, max_sequences)
        self._session = drafter.open_session(kv, graphs)

    @property
    def max_draft_tokens(self) -> int:
        """Most drafts of one proposal."""
        return self.config.max_draft_tokens

    @property
    def num_sequences(self) -> int:
        """Sequences held."""
        return len(self._sequences)

    @property
    def num_evicted(self) -> int:
        """Sequences that lost their rows for others' room, since the start."""
        return self._sequences.num_evicted

    @property
    def num_free_tokens(self) -> int:
        """Rows that the KV has room for now, in whole pages."""
        return self.kv.num_free_pages * self.kv.page_size

    @torch.inference_mode()
    def step(self, tasks: Sequence[DraftTask]) -> list[Answer]:
        """One answer a task, in order; one batched forward for all of them a draft position.

        A sequence whose rows do not fit beside the others of the step gets an empty Proposal and
        goes on cold from its anchor. Raises ValueError, with nothing changed, for two tasks of one
        key, rows of another width, or token ids outside the vocabulary.
        """
        self._check(tasks)
        keys = {task.key for task in tasks}
        placed = [self._admit(task, keys) for task in tasks]
        admitted = [item for item in placed if isinstance(item, Admitted)]
        proposals = iter(self._session.run(admitted) if admitted else ())
        for item in admitted:
            item.sequence.end = item.task.anchor_position
        return [next(proposals) if isinstance(item, Admitted) else item for item in placed]

    def drop(self, key: str) -> None:
        """The sequence has ended; an unknown key is ignored."""
        self._sequences.drop(key)

    def _admit(self, task: DraftTask, keys: Collection[str]) -> Admitted | Answer:
        sequence = self._sequences.place(task, keys)
        if isinstance(sequence, Answer):
            return sequence
        completed = self._session.complete(task, sequence)
        if not isinstance(completed, DraftTask):
            return completed
        num_scratch = self._session.num_scratch_rows if task.num_wanted > 0 else 0
        if not self._sequences.fit(sequence, task.anchor_position, num_scratch, keys):
            return Proposal()
        return Admitted(completed, sequence)

    def _check(self, tasks: Sequence[DraftTask]) -> None:
        if len({task.key for task in tasks}) < len(tasks):
            raise ValueError("a step takes one task a sequence")
        for task in tasks:
            self._check_task(task)

    def _check_task(self, task: DraftTask) -> None:
        ids, vocab_size = task.next_token_ids, self.config.vocab_size
        shape = (len(ids), self.config.fused_width)
        if tuple(task.rows.shape) != shape:
            raise ValueError(f"{task.key}: rows {tuple(task.rows.shape)} must be {shape}")
        if task.first_position < 0 or task.num_wanted < 0:
            raise ValueError(
                f"{task.key}: first_position {task.first_position} and num_wanted "
                f"{task.num_wanted} must be >= 0"
            )
        if ids and task.anchor_id != ids[-1]:
            raise ValueError(f"{task.key}: anchor {task.anchor_id} is not the last token {ids[-1]}")
        lowest, highest = min(ids, default=task.anchor_id), max(ids, default=task.anchor_id)
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(
                f"{task.key}: token ids {lowest}..{highest} are outside [0, {vocab_size})"
            )
