"""A drafter's embedding and head, its own or its target's, and its map to target token ids.

V target vocabulary, Vd draft vocabulary, d draft width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.layout import HeadLayout
from attention.single_group import SingleGroup
from kvbraid.model.layers import Projection, VocabularyShard
from kvbraid.model.parallel import ParallelContext
from kvbraid.model.weight_reader import WeightReader
from kvbraid.sampling_noise import token_words
from kvbraid.speculative.drafter_config import DrafterConfig

_TARGET_EMBEDDING = "model.embed_tokens.weight"


class VocabularyWeights:
    """Immutable after loading."""

    def __init__(
        self,
        embedding: Tensor,
        head: Callable[[Tensor], Tensor],
        target_ids: Tensor | None,
    ) -> None:
        """embedding [V, d]; head: [N, d] -> [N, Vd]; target_ids: int64 [Vd], None where draft ids
        are target ids."""
        self._embedding = embedding
        self._head = head
        self._target_ids = target_ids

    def embed(self, token_ids: Tensor) -> Tensor:
        """Target token ids, int64 [T] -> [T, d]."""
        return F.embedding(token_ids, self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, d] -> float32 [N, Vd], fresh."""
        return self._head(hidden).float()

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """int64, any shape -> the same."""
        return draft_ids if self._target_ids is None else self._target_ids[draft_ids]

    def target_laws(self, laws: Tensor) -> Tensor:
        """Laws over draft ids [n, Vd] -> over target ids [n, V]: 0 where no draft id leads to."""
        if self._target_ids is None:
            return laws
        return laws.new_zeros(len(laws), len(self._embedding)).index_copy_(
            1, self._target_ids, laws
        )

    @cached_property
    def noise_words(self) -> Tensor:
        """int32 [Vd]: hash of each draft id's target id, see `kvbraid.sampling_noise`."""
        words = token_words(0, len(self._embedding), self._embedding.device)
        return words if self._target_ids is None else words[self._target_ids]

    def columns_of(self, token_id: int) -> Tensor:
        """Columns of the logits that mean this target token: int64, one or none."""
        if self._target_ids is None:
            return torch.tensor([token_id], device=self._embedding.device)
        return (self._target_ids == token_id).nonzero().squeeze(1)


def load_vocabulary(
    reader: WeightReader, target: WeightReader, config: DrafterConfig, *, is_target_tied: bool
) -> VocabularyWeights:
    """What the drafter's file has is its own; what it lacks comes from its target's checkpoint.

    Raises CheckpointError naming the tensor that is missing or has another shape.
    """
    width = config.hidden_size
    shape = (config.vocab_size, width)
    target_ids = _load_target_ids(reader, config)
    if config.has_own_embedding:
        embedding = reader.take("embed_tokens.weight", shape)
    else:
        embedding = target.take(_TARGET_EMBEDDING, shape)
    if config.has_own_head:
        own = reader.take("lm_head.weight", (config.draft_vocab_size, width))
        return VocabularyWeights(embedding, Projection([own]).forward, target_ids)
    if not is_target_tied:
        shared = target.take("lm_head.weight", shape)
    elif config.has_own_embedding:
        shared = target.take(_TARGET_EMBEDDING, shape)
    else:
        shared = embedding
    if target_ids is not None:
        shared = shared[target_ids]
    return VocabularyWeights(embedding, _head_of_target(shared), target_ids)


def _head_of_target(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """As the target computes it: a tied embedding is not copied into another memory order."""
    alone = ParallelContext(HeadLayout(1, 1, 1, 0, 1), SingleGroup())
    return VocabularyShard(weight, weight, range(len(weight)), alone).logits


def _load_target_ids(reader: WeightReader, config: DrafterConfig) -> Tensor | None:
    """Target id of each draft id, from offsets."""
    size = config.draft_vocab_size
    if size == config.vocab_size:
        return None
    offsets = reader.take("d2t", (size,), dtype=torch.int64)
    return torch.arange(size, device=offsets.device) + offsets
