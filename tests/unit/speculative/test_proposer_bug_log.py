"""Mistakes of other engines' drafters at work, by their row in the bug log of spec.md section 6.

Row 3 is in test_draft_sampling.py, rows of the loaders are in dialects/test_drafter_bug_log.py.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kvbraid.speculative import context_rows
from kvbraid.speculative.drafter_config import AnyDrafterConfig
from kvbraid.speculative.proposal import DraftTask, Proposal
from kvbraid.speculative.proposer import Proposer
from tests.unit.speculative.drafters.random_drafters import (
    DSPARK_FORMS,
    EAGLE3_FORMS,
    MASK,
    VOCAB,
    WIDTH,
    RandomDrafter,
    dspark_config,
    eagle3_config,
    random_drafter,
)
from tests.unit.speculative.drafters.reference import Weights, dspark_drafts
from tests.unit.speculative.drafters.streams import check, expected, poisoned, random_stream

KINDS = {"eagle3": eagle3_config(), "dspark": dspark_config()}
both_kinds = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def _single_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_row_1_accepted_drafts_are_extended_again_with_the_targets_rows(name: str) -> None:
    """vllm 14649: KV of accepted tokens kept what the drafter had guessed, 8-15% less accepted."""
    drafter = random_drafter(EAGLE3_FORMS[name])
    proposer, fresh = poisoned(drafter, page_size=4), poisoned(drafter, page_size=4)
    stream = random_stream("a", 60, WIDTH, 0)
    (proposal,) = proposer.step([stream.task(10, 5)])
    assert isinstance(proposal, Proposal)
    # The target agrees with every draft, so that their guessed keys could be kept.
    stream.token_ids[11:16] = proposal.token_ids
    (again,) = proposer.step([stream.task(16, 5)])
    (whole,) = fresh.step([stream.task(16, 5, first=0)])
    assert again == whole
    check(again, expected(drafter, stream, 5))
    keys = [p.kv.pool.layer(0)[0].flatten(0, 1)[4 : 4 + 15] for p in (proposer, fresh)]
    torch.testing.assert_close(*keys, atol=1e-5, rtol=1e-5)


def test_row_5_the_block_begins_at_the_anchors_own_position() -> None:
    """ik_llama.cpp 2296: the block one position late, acceptance .8 -> .22 at 12K."""
    drafter = random_drafter(dspark_config())
    proposer = poisoned(drafter)
    stream = random_stream("a", 700, WIDTH, 0)
    (answer,) = proposer.step([stream.task(650, 4)])
    check(answer, expected(drafter, stream, 4))
    config = drafter.config
    late_rows = torch.cat((stream.rows[:650], torch.zeros(1, WIDTH)))
    anchor_id = stream.token_ids[650]
    late = dspark_drafts(Weights(drafter.weights), config, late_rows, 0, anchor_id, 4)
    with pytest.raises(AssertionError):
        check(answer, late)


@both_kinds
def test_row_7_positions_past_2048(config: AnyDrafterConfig) -> None:
    """vllm 48894, 23072; sglang 6783, 3574: the draft's nominal 2048 positions, then garbage."""
    drafter = random_drafter(config)
    proposer = poisoned(drafter, num_kv_tokens=4096)
    stream = random_stream("a", 2200, WIDTH, 1)
    (answer,) = proposer.step([stream.task(2100, 2)])
    check(answer, expected(drafter, stream, 2))
    (answer,) = proposer.step([stream.task(2103, 2)])
    check(answer, expected(drafter, stream, 2))
    far = random_stream("far", 70, WIDTH, 2)
    rows, ids = far.rows[:40], tuple(far.token_ids[1:41])
    (answer,) = proposer.step([DraftTask("far", 131_072, rows, ids, ids[-1], 4, starts_cold=True)])
    assert isinstance(answer, Proposal)
    assert len(answer.token_ids) == 4


@both_kinds
def test_row_10_the_drafts_own_embedding_and_head_are_used(config: AnyDrafterConfig) -> None:
    """vllm 28549: the target's replaced them, acceptance length 1.32 instead of 2.49."""
    own = random_drafter(replace(config, has_own_embedding=True, has_own_head=True))
    embedding = own.weights["model.embed_tokens.weight"]
    shared = RandomDrafter(own.config, {**own.weights, "embed_tokens.weight": embedding})
    stream = random_stream("a", 40, WIDTH, 3)
    (answer,) = poisoned(own).step([stream.task(30, 4)])
    check(answer, expected(own, stream, 4))
    assert isinstance(answer, Proposal)
    assert list(answer.token_ids) != expected(shared, stream, 4).token_ids, "the test can tell"


@both_kinds
def test_row_14_a_prompt_of_one_token(config: AnyDrafterConfig) -> None:
    """sglang 36140: a one-token prompt crashed the decode side."""
    drafter = random_drafter(config)
    stream = random_stream("a", 10, WIDTH, 4)
    (answer,) = poisoned(drafter).step([stream.task(1, 4)])
    check(answer, expected(drafter, stream, 4))


@both_kinds
def test_row_19_only_real_tokens_are_proposed(config: AnyDrafterConfig) -> None:
    """vllm 36906, 37159: placeholders (-1) of a drafter that returned fewer were embedded."""
    proposer = poisoned(random_drafter(config), num_kv_tokens=128)
    draw = random.Random(0)
    streams = [random_stream(str(i), 90, WIDTH, i) for i in range(4)]
    for _ in range(8):
        tasks = []
        for stream in streams:
            first = min(stream.committed + draw.choice((0, 0, 0, 1)), 70)
            tasks.append(stream.task(first + draw.randint(0, 9), draw.randint(0, 9), first=first))
        for task, answer in zip(tasks, proposer.step(tasks), strict=True):
            if isinstance(answer, Proposal):
                assert len(answer.token_ids) <= min(task.num_wanted, config.max_draft_tokens)
                assert all(0 <= token_id < VOCAB for token_id in answer.token_ids)


@pytest.mark.parametrize("form", ["vanilla", "draft_vocabulary", "from_mask_slots"])
def test_row_19_the_mask_token_is_never_proposed(form: str) -> None:
    config = DSPARK_FORMS[form]
    drafter = random_drafter(config)
    head = drafter.weights["lm_head.weight"]
    ids = torch.arange(len(head)) + drafter.weights.get("d2t", torch.zeros(len(head))).long()
    column = (ids - MASK).abs().argmin()
    mask_id = int(ids[column])
    config = replace(config, mask_token_id=mask_id)
    # Every other logit is 0: the mask token would win wherever its own is positive.
    weights = {**drafter.weights, "lm_head.weight": torch.zeros_like(head)}
    weights["lm_head.weight"][column] = 1e3
    weights["markov_head.markov_w2.weight"] = torch.zeros(len(head), config.markov_rank)
    eager = RandomDrafter(config, weights)
    proposer = Proposer(eager.load(), num_kv_tokens=512, max_sequences=16)
    streams = [random_stream(str(i), 20, WIDTH, i) for i in range(16)]
    for answer in proposer.step([stream.task(9, 4) for stream in streams]):
        assert isinstance(answer, Proposal)
        assert len(answer.token_ids) == config.max_draft_tokens
        assert mask_id not in answer.token_ids


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
@both_kinds
def test_row_28_a_prompt_longer_than_a_chunk(
    config: AnyDrafterConfig, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp 24707: the feature buffer was smaller than the prompt."""
    monkeypatch.setattr(context_rows, "MAX_CHUNK_ROWS", chunk)
    drafter = random_drafter(config)
    proposer = poisoned(drafter, page_size=4)
    streams = [random_stream(str(i), 90, WIDTH, i) for i in range(3)]
    lengths = (50, 3, 29)
    tasks = [s.task(n, 4) for s, n in zip(streams, lengths, strict=True)]
    for stream, answer in zip(streams, proposer.step(tasks), strict=True):
        check(answer, expected(drafter, stream, 4))


@pytest.mark.parametrize("page_size", [3, 5, 7])
@both_kinds
def test_row_41_pages_that_fit_neither_block_nor_target(
    config: AnyDrafterConfig, page_size: int
) -> None:
    """vllm 50012: misaligned where the draft's block size was not the target's."""
    drafter = random_drafter(config)
    proposer = poisoned(drafter, page_size=page_size)
    stream = random_stream("a", 60, WIDTH, 5)
    for end in (13, 14, 19, 33):
        (answer,) = proposer.step([stream.task(end, 4)])
        check(answer, expected(drafter, stream, 4))
