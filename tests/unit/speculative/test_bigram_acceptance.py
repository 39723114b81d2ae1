"""Hand-built drafters of a bigram target: accepted counts follow from arithmetic.

The target walks a ring: t + 1 after t. The drafter is right except after the token `wrong_after`,
so from anchor a it gets min(k, (wrong_after - a) mod V) drafts right.
"""

from __future__ import annotations

import pytest
import torch

from kvbraid.speculative.proposal import DraftTask, Proposal
from kvbraid.speculative.proposer import Proposer
from tests.unit.speculative.drafters.bigram import dspark_bigram, eagle3_bigram
from tests.unit.speculative.drafters.random_drafters import RandomDrafter

SIZE = 7
RING = [(token + 1) % SIZE for token in range(SIZE)]
NUM_STEPS = 12


def builders(successors: list[int], num_drafts: int) -> dict[str, RandomDrafter]:
    return {
        "eagle3": eagle3_bigram(successors, num_drafts),
        "dspark": dspark_bigram(successors, num_drafts),
        "dspark_from_mask_slots": dspark_bigram(successors, num_drafts, predicts_from_anchor=False),
    }


KINDS = list(builders(RING, 1))


def measured(drafter: RandomDrafter, prompt: list[int], num_steps: int = NUM_STEPS) -> list[int]:
    """Accepted drafts of each step of a greedy run; fused rows are noise that means nothing."""
    torch.set_num_threads(1)
    proposer = Proposer(drafter.load(), num_kv_tokens=1024, max_sequences=1, page_size=4)
    proposer.kv.pool.fill_nan()
    width, num_drafts = drafter.config.hidden_size, drafter.config.max_draft_tokens
    tokens, first, counts = [*prompt, RING[prompt[-1]]], 0, []
    for _ in range(num_steps):
        num_rows = len(tokens) - 1 - first
        rows = 1e-3 * torch.randn(num_rows, width) * (torch.arange(width) == width - 2)
        task = DraftTask("a", first, rows, tuple(tokens[first + 1 :]), tokens[-1], num_drafts)
        (proposal,) = proposer.step([task])
        assert isinstance(proposal, Proposal)
        assert len(proposal.token_ids) == num_drafts
        first = len(tokens) - 1
        accepted = 0
        for draft in proposal.token_ids:
            tokens.append(RING[tokens[-1]])
            if draft != tokens[-1]:
                break
            accepted += 1
        else:
            tokens.append(RING[tokens[-1]])
        counts.append(accepted)
    return counts


def predicted(anchor: int, wrong_after: int, num_drafts: int) -> list[int]:
    counts = []
    for _ in range(NUM_STEPS):
        counts.append(min(num_drafts, (wrong_after - anchor) % SIZE))
        anchor = (anchor + counts[-1] + 1) % SIZE
    return counts


@pytest.mark.parametrize("num_drafts", [1, 2, 4, 7])
@pytest.mark.parametrize("wrong_after", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_accepted_counts_follow_from_arithmetic(
    kind: str, wrong_after: int, num_drafts: int
) -> None:
    successors = list(RING)
    successors[wrong_after] = (wrong_after + 3) % SIZE
    drafter = builders(successors, num_drafts)[kind]
    counts = measured(drafter, [2, 3, 4])
    assert counts == predicted(5, wrong_after, num_drafts)
    assert min(counts) < num_drafts


@pytest.mark.parametrize("num_drafts", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_an_oracle_gets_every_draft_right(kind: str, num_drafts: int) -> None:
    drafter = builders(RING, num_drafts)[kind]
    assert measured(drafter, [6]) == [num_drafts] * NUM_STEPS


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_of_another_target_gets_none_right(kind: str) -> None:
    backwards = [(token - 1) % SIZE for token in range(SIZE)]
    assert measured(builders(backwards, 4)[kind], [1, 2]) == [0] * NUM_STEPS
