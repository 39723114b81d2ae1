"""Per-rank mirror of the running sequences: every rank holds the same tokens and page tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbraid.engine.sampling_state import SequenceSampling
from kvbraid.engine.step_plan import AddPages, Admit


@dataclass(slots=True, eq=False)
class RankSequence:
    """A sequence as a rank sees it. `sampling` holds the tokens."""

    slot: int
    sampling: SequenceSampling
    token_ids: list[int]
    num_pages: int

    def append(self, token_id: int) -> None:
        """One more token, sampled or handed over."""
        self.token_ids.append(token_id)
        self.sampling.append(token_id)


class RankState:
    """Sequences by slot and one page table [max_num_seqs, max_pages] int32 shared by all steps."""

    def __init__(self, max_num_seqs: int, max_pages: int) -> None:
        self.page_table: NDArray[np.int32] = np.zeros((max_num_seqs, max_pages), dtype=np.int32)
        self._sequences: dict[int, RankSequence] = {}

    def __getitem__(self, slot: int) -> RankSequence:
        return self._sequences[slot]

    def admit(self, operation: Admit) -> RankSequence:
        """A new sequence takes its slot; entries past its pages keep what they held."""
        sampling = SequenceSampling(
            operation.sampling,
            key=operation.key,
            token_ids=operation.token_ids,
            num_prompt_tokens=operation.num_prompt_tokens,
        )
        sequence = RankSequence(operation.slot, sampling, list(operation.token_ids), 0)
        self._sequences[operation.slot] = sequence
        self.add_pages(AddPages(operation.slot, operation.pages))
        return sequence

    def add_pages(self, operation: AddPages) -> None:
        """The sequence's page table grows."""
        sequence = self._sequences[operation.slot]
        end = sequence.num_pages + len(operation.pages)
        self.page_table[operation.slot, sequence.num_pages : end] = operation.pages
        sequence.num_pages = end

    def release(self, slot: int) -> None:
        """The slot is free."""
        del self._sequences[slot]

    def pages_of(self, slot: int) -> NDArray[np.int32]:
        """Pages of the sequence in `slot`, [num_pages] int32 (a view)."""
        return self.page_table[slot, : self._sequences[slot].num_pages]
