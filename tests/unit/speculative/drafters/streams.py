"""Sequences as a target would hand them to a drafter, and what the reference says to each task."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbraid.speculative.drafter_config import Eagle3Config
from kvbraid.speculative.proposal import Answer, DraftSampling, DraftTask, Proposal
from kvbraid.speculative.proposer import Proposer
from tests.unit.speculative.drafters.random_drafters import VOCAB, RandomDrafter
from tests.unit.speculative.drafters.reference import (
    Choose,
    Drafts,
    Weights,
    dspark_drafts,
    eagle3_drafts,
    greedy,
)


@dataclass
class Stream:
    """One sequence: a token and a fused row a position; positions before `committed` have rows."""

    key: str
    token_ids: list[int]
    rows: Tensor
    base: int = 0
    committed: int = 0

    def task(
        self, end: int, num_wanted: int, first: int | None = None, **changes: object
    ) -> DraftTask:
        """Rows of [first, end), first being what is committed unless given; commits them."""
        first = self.committed if first is None else first
        self.committed = end
        if changes.get("starts_cold"):
            self.base = first
        return DraftTask(
            self.key,
            first,
            self.rows[first:end],
            tuple(self.token_ids[first + 1 : end + 1]),
            self.token_ids[end],
            num_wanted,
            **changes,  # type: ignore[arg-type]
        )


def random_stream(key: str, length: int, width: int, seed: int) -> Stream:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, VOCAB, (length + 1,), generator=generator).tolist()
    return Stream(key, token_ids, torch.randn(length, width, generator=generator))


def expected(
    drafter: RandomDrafter, stream: Stream, num_drafts: int, choose: Choose = greedy
) -> Drafts:
    """What the reference drafts after the stream's committed rows."""
    config, w = drafter.config, Weights(drafter.weights)
    base, end = stream.base, stream.committed
    rows = stream.rows[base:end]
    num_drafts = min(num_drafts, config.max_draft_tokens)
    if isinstance(config, Eagle3Config):
        if not len(rows):
            return Drafts()
        tokens = stream.token_ids[base + 1 : end + 1]
        return eagle3_drafts(w, config, rows, tokens, base, num_drafts, choose)
    return dspark_drafts(w, config, rows, base, stream.token_ids[end], num_drafts, choose)


def check(answer: Answer, drafts: Drafts) -> None:
    assert isinstance(answer, Proposal)
    assert list(answer.token_ids) == drafts.token_ids
    assert len(answer.confidences) == len(drafts.confidences)
    for ours, theirs in zip(answer.confidences, drafts.confidences, strict=True):
        assert abs(ours - theirs) < 1e-4


def poisoned(drafter: RandomDrafter, **sizes: int) -> Proposer:
    """A proposer whose KV is NaN wherever nothing was written."""
    proposer = Proposer(drafter.load(), **({"num_kv_tokens": 1024, "max_sequences": 8} | sizes))
    proposer.kv.pool.fill_nan()
    return proposer


SAMPLED = DraftSampling(temperature=0.8, signed_key=-1234567890123456789)
