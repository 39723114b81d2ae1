"""What a kind of drafter computes in a step: launches only, the same whether they run at once or
are captured. What is uploaded before and read afterwards is `DraftForward`'s business.

T rows, B sequences, k drafts, d draft width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attention.kv_rows import WritePlan
from kvbraid.model.attention_port import LayerAttention
from kvbraid.speculative.draft_kv import Int64Array
from kvbraid.speculative.drafter_config import AnyDrafterConfig
from kvbraid.speculative.vocabulary_weights import VocabularyWeights


class Context(NamedTuple):
    """Rows to ingest, on the device. rows: [T, d] in the drafter's dtype; next_token_ids: the token
    after each; positions: absolute; kept_slots: slot of the sequence whose newest row it is, the
    KV's `spare_slot` for all others; int64 [T]."""

    rows: Tensor
    next_token_ids: Tensor
    positions: Tensor
    kept_slots: Tensor
    write_plan: WritePlan


class Anchors(NamedTuple):
    """Where drafts begin, on the device: token_ids, positions and slots of the sequences, int64
    [B]. Padding has the KV's `spare_slot`."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor


class Drawn(NamedTuple):
    """token_ids: target ids, int64 [B, k]. confidences: float32 [B, k], None without a head for
    them."""

    token_ids: Tensor
    confidences: Tensor | None

    def packed(self) -> Tensor:
        """float64 [B, k or 2k], ids then confidences, both exact: one copy to the host for all."""
        parts = self.token_ids.double()
        if self.confidences is None:
            return parts
        return torch.cat((parts, self.confidences.double()), 1)


class TokenChoice(Protocol):
    """Draws one draft of each sequence."""

    def choose(self, scores: Tensor, draft: int) -> Tensor:
        """Draft `draft` (0-based), as draft ids: int64 [B]. scores: float32 [B, Vd], logits;
        overwritten."""
        ...


Forwards = Callable[[int], LayerAttention]
"""Attention of each forward of a proposal; asked for in order, once each."""


class DraftCompute(Protocol):
    """A drafter on one KV, and what it keeps of each sequence beside it, by slot."""

    @property
    def config(self) -> AnyDrafterConfig:
        """The drafter's."""
        ...

    @property
    def vocabulary(self) -> VocabularyWeights:
        """The drafter's."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of rows."""
        ...

    def num_forwards(self, num_drafts: int) -> int:
        """Forwards of a proposal; each after the first has a row more in every sequence."""
        ...

    def first_lengths(self, num_rows: Int64Array) -> Int64Array:
        """Rows of each sequence in the first forward, those that it writes itself included.
        num_rows: those that were ingested, int64 [B]."""
        ...

    def ingest(self, context: Context) -> None:
        """Put rows into the KV."""
        ...

    def draft(
        self, anchors: Anchors, num_drafts: int, forwards: Forwards, choice: TokenChoice
    ) -> Drawn:
        """Drafts behind the anchors."""
        ...
