"""Draws drafts the way the target will draw the same tokens: greedy, or with the same noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvbraid.sampling_noise import hash_words, negative_gumbel, row_words
from kvbraid.speculative.proposal import DraftTask
from kvbraid.speculative.vocabulary_weights import VocabularyWeights


class DraftSampler:
    """Draws the drafts of one step's B sequences, one draft of each at a time.

    Noise belongs to (key, absolute position of the token drawn, target token id), as in the
    engine's sampler; filters and penalties of the target are not known here, which costs
    agreement only.
    """

    def __init__(
        self, tasks: Sequence[DraftTask], vocabulary: VocabularyWeights, device: torch.device
    ) -> None:
        self._vocabulary = vocabulary
        rows = [i for i, task in enumerate(tasks) if task.sampling.temperature > 0]
        self._rows: Tensor | None = None
        self._wants_laws = any(task.sampling.wants_law for task in tasks)
        self._places = {row: place for place, row in enumerate(rows)}
        self._laws: list[Tensor] = []
        if not rows:
            return
        drawn = [tasks[i] for i in rows]
        self._rows = torch.tensor(rows, device=device)
        self._keys = torch.tensor([task.sampling.signed_key for task in drawn], device=device)
        first = np.array([task.anchor_position + 1 for task in drawn], dtype=np.int64)
        self._first_positions = torch.from_numpy(first).to(device)
        self._temperatures = torch.tensor(
            [task.sampling.temperature for task in drawn], dtype=torch.float32, device=device
        )

    def choose(self, scores: Tensor, draft: int) -> Tensor:
        """Draft `draft` (0-based) of each sequence, as draft ids: int64 [B].

        scores: float32 [B, Vd], logits; overwritten.
        """
        if self._rows is not None:
            words = row_words(self._keys, self._first_positions + draft)
            h = hash_words(self._vocabulary.noise_words, words.a[:, None], words.b[:, None])
            drawn = scores.index_select(0, self._rows).div_(self._temperatures[:, None])
            if self._wants_laws:
                self._laws.append(drawn.softmax(1))
            scores.index_copy_(0, self._rows, drawn.sub_(negative_gumbel(h)))
        # On CPUs argmax takes three times as long.
        return scores.max(dim=1).indices

    def laws(self, task: DraftTask, row: int) -> Tensor | None:
        """The law of each draft that `choose` has chosen for `task`, number `row` of the tasks, at
        most as many as it wanted: float32 [k, V] over target ids; None unless it wants them."""
        if not task.sampling.wants_law or row not in self._places:
            return None
        laws = torch.stack([law[self._places[row]] for law in self._laws[: task.num_wanted]])
        return self._vocabulary.target_laws(laws)
