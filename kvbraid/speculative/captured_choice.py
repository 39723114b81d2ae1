"""How drafts are drawn in a captured graph: as `DraftSampler` does, from memory that is written
before each replay."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvbraid.sampling_noise import hash_words, negative_gumbel, row_words
from kvbraid.speculative.vocabulary_weights import VocabularyWeights


class GreedyChoice:
    """The best of each row. Implements `TokenChoice`."""

    def choose(self, scores: Tensor, draft: int) -> Tensor:
        """See TokenChoice."""
        return scores.max(dim=1).indices


class SamplingColumns(NamedTuple):
    """keys, anchor_positions: int64 [B]; temperatures: float64 [B], 0 for greedy rows."""

    keys: Tensor
    anchor_positions: Tensor
    temperatures: Tensor


class MixedChoice:
    """Greedy where the temperature is 0, with noise elsewhere. Implements `TokenChoice`."""

    def __init__(self, columns: SamplingColumns, vocabulary: VocabularyWeights) -> None:
        self._columns = columns
        self._vocabulary = vocabulary

    def choose(self, scores: Tensor, draft: int) -> Tensor:
        """See TokenChoice."""
        keys, positions, temperatures = self._columns
        words = row_words(keys, positions + (1 + draft))
        h = hash_words(self._vocabulary.noise_words, words.a[:, None], words.b[:, None])
        is_greedy = temperatures == 0
        divisors = temperatures.float().masked_fill_(is_greedy, 1.0)
        drawn = (scores / divisors[:, None]).sub_(negative_gumbel(h))
        return torch.where(is_greedy[:, None], scores, drawn).max(dim=1).indices
