"""Drafts at a temperature: drawn with the sampler's own noise, so that they agree with it."""

from __future__ import annotations

import math

import pytest
import torch

from attention.single_group import SingleGroup
from kvbraid.engine.sampler import sample
from kvbraid.engine.sampling_rows import KEEP_ALL, RowGroup, SamplingRows
from kvbraid.sampling_noise import hash_words, negative_gumbel, row_words, token_words
from kvbraid.speculative.drafter_config import AnyDrafterConfig
from kvbraid.speculative.proposal import DraftSampling, DraftTask, Proposal
from kvbraid.speculative.proposer import Proposer
from tests.unit.speculative.drafters.random_drafters import (
    VOCAB,
    WIDTH,
    RandomDrafter,
    dspark_config,
    eagle3_config,
    random_drafter,
)
from tests.unit.speculative.drafters.reference import Choose
from tests.unit.speculative.drafters.streams import (
    SAMPLED,
    check,
    expected,
    poisoned,
    random_stream,
)

FORMS = {
    "eagle3": eagle3_config(),
    "eagle3-map": eagle3_config(draft_vocab_size=37),
    "dspark": dspark_config(),
    "dspark-map": dspark_config(draft_vocab_size=37, has_own_head=True),
}
CHI2_LIMIT = 55.9  # 7 degrees of freedom, p = 1e-9
NUM_DRAWS = 4096


@pytest.fixture(autouse=True)
def _single_thread() -> None:
    torch.set_num_threads(1)


def coupled(drafter: RandomDrafter, sampling: DraftSampling, anchor_position: int) -> Choose:
    """argmax(logits / T + noise(key, position, target id)), in float64."""
    offsets = drafter.weights.get("d2t", torch.zeros(VOCAB, dtype=torch.int64))

    def choose(logits: torch.Tensor, draft: int) -> int:
        position = torch.tensor([anchor_position + 1 + draft])
        words = row_words(torch.tensor([sampling.signed_key]), position)
        ids = torch.arange(len(logits)) + offsets[: len(logits)]
        noise = -negative_gumbel(hash_words(token_words(0, VOCAB, ids.device)[ids], *words))
        return int((logits / sampling.temperature + noise.double()).argmax())

    return choose


@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_noise_belongs_to_key_position_and_target_id(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter)
    greedy, drawn, other = (random_stream(name, 60, WIDTH, seed) for seed, name in enumerate("gdo"))
    hot = DraftSampling(temperature=1.7, signed_key=42)
    for end in (11, 13, 18):
        tasks = [
            greedy.task(end + 2, 4),
            drawn.task(end, 4, sampling=SAMPLED),
            other.task(end - 5, 4, sampling=hot),
        ]
        answers = proposer.step(tasks)
        check(answers[0], expected(drafter, greedy, 4))
        check(answers[1], expected(drafter, drawn, 4, coupled(drafter, SAMPLED, end)))
        check(answers[2], expected(drafter, other, 4, coupled(drafter, hot, end - 5)))


def test_a_drafter_with_the_targets_logits_draws_the_targets_tokens() -> None:
    """The whole point of sharing the noise: equal laws give equal samples, always."""
    logits = 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    logits[dspark_config().mask_token_id] = -1e4
    proposer = Proposer(constant_drafter(logits), num_kv_tokens=4096, max_sequences=64)
    tasks = [
        DraftTask(str(i), i, torch.zeros(1, WIDTH), (3,), 3, 4, DraftSampling(0.7, i * 77), True)
        for i in range(64)
    ]
    for task, answer in zip(tasks, proposer.step(tasks), strict=True):
        assert isinstance(answer, Proposal)
        for draft, token_id in enumerate(answer.token_ids):
            position = task.anchor_position + 1 + draft
            assert token_id == engine_sample(logits, task.sampling, position)


def engine_sample(logits: torch.Tensor, sampling: DraftSampling, position: int) -> int:
    group = RowGroup(
        rows=torch.tensor([0]),
        key=torch.tensor([sampling.signed_key]),
        position=torch.tensor([position]),
        temperature=torch.tensor([sampling.temperature]),
        top_k=torch.tensor([KEEP_ALL]),
        top_p=torch.ones(1),
        min_p=torch.zeros(1),
        has_top_k=False,
        has_top_p=False,
    )
    rows = SamplingRows(1, None, group, None, None, (None,))
    return int(sample(logits[None].clone(), 0, SingleGroup(), rows).token_ids[0])


def constant_drafter(logits: torch.Tensor, dtype: torch.dtype = torch.float32):  # type: ignore[no-untyped-def]
    """A DSpark drafter whose logits are these, whatever it sees: its norm's output is one-hot."""
    config = dspark_config(
        vocab_size=len(logits),
        draft_vocab_size=len(logits),
        has_own_head=True,
        has_own_embedding=True,
        has_confidence_head=False,
        mask_token_id=min(5, len(logits) - 1),
    )
    weights = {name: torch.zeros_like(t) for name, t in random_drafter(config).weights.items()}
    weights["embed_tokens.weight"] = torch.zeros(len(logits), WIDTH)
    weights["embed_tokens.weight"][:, 0] = 1.0
    weights["norm.weight"] = torch.ones(WIDTH)
    weights["lm_head.weight"] = torch.zeros(len(logits), WIDTH)
    weights["lm_head.weight"][:, 0] = logits / math.sqrt(WIDTH)
    weights["markov_head.markov_w1.weight"] = torch.zeros(len(logits), config.markov_rank)
    weights["markov_head.markov_w2.weight"] = torch.zeros(len(logits), config.markov_rank)
    return RandomDrafter(config, weights).load(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_3_drafts_of_a_bf16_drafter_follow_the_law_of_their_logits(dtype: torch.dtype) -> None:
    """DeepSpec 31: drafts were drawn from a softmax in bf16. The law is taken in float32 of
    whatever the head gave, and the noise is never rounded. The mask token has probability 0."""
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5, 1.5, 0.25, -1.0, 2.0, 0.75])
    temperature = 0.9
    drafter = constant_drafter(logits, dtype)
    assert drafter.dtype == dtype
    proposer = Proposer(drafter, num_kv_tokens=512 * 16, max_sequences=512)
    counts = torch.zeros(len(logits))
    for start in range(0, NUM_DRAWS // 4, 512):
        tasks = [
            DraftTask(
                str(i), 0, torch.zeros(0, WIDTH), (), 1, 4,
                DraftSampling(temperature, (start + i) * 0x9E3779B97F4A7C15 % (1 << 63)), True,
            )
            for i in range(512)
        ]  # fmt: skip
        for answer in proposer.step(tasks):
            assert isinstance(answer, Proposal)
            assert len(answer.token_ids) == 4
            counts += torch.bincount(torch.tensor(answer.token_ids), minlength=len(logits))
        for task in tasks:
            proposer.drop(task.key)
    allowed = [i for i in range(len(logits)) if i != 5]
    assert counts[5] == 0
    given = drafter.vocabulary.logits(torch.eye(1, WIDTH, dtype=dtype) * math.sqrt(WIDTH))[0]
    law = (given[allowed] / temperature).softmax(-1) * counts.sum()
    chi2 = ((counts[allowed] - law) ** 2 / law).sum()
    assert chi2 < CHI2_LIMIT
    wrong = given[allowed].softmax(-1) * counts.sum()
    assert ((counts[allowed] - wrong) ** 2 / wrong).sum() > chi2, "the test can tell"
