"""Log-probabilities are those of the raw logits, in the right order, for the rows that ask."""

from __future__ import annotations

import pytest
import torch

from attention.single_group import SingleGroup
from kvbraid.engine.sampler import sample
from kvbraid.engine.sampling_state import SequenceSampling, build_rows
from kvbraid.request import PositionLogprobs, SamplingParams

VOCAB = 1000


def logprobs_of(
    logits: torch.Tensor, params: list[SamplingParams]
) -> tuple[list[int], list[PositionLogprobs | None]]:
    sequences = [
        SequenceSampling(p, key=row, token_ids=[3, 4], num_prompt_tokens=1)
        for row, p in enumerate(params)
    ]
    rows = build_rows(
        sequences,
        positions=[2] * len(params),
        vocab_shard=range(logits.shape[1]),
        device=torch.device("cpu"),
    )
    result = sample(logits, 0, SingleGroup(), rows)
    return result.token_ids.tolist(), result.logprobs


def test_logprobs_ignore_temperature_filters_and_penalties() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    numbers = [None, 0, 1, 5, 20, None]
    params = [
        SamplingParams(
            temperature=0.5, top_k=30, presence_penalty=2.0, logit_bias={9: 50.0}, top_logprobs=n
        )
        for n in numbers
    ]
    tokens, answers = logprobs_of(logits, params)
    expected = logits.double().log_softmax(1)
    for row, num in enumerate(numbers):
        answer = answers[row]
        if num is None:
            assert answer is None
            continue
        assert answer is not None
        assert answer.chosen.token_id == tokens[row] == 9
        assert answer.chosen.logprob == pytest.approx(expected[row, 9].item(), abs=1e-5)
        best = expected[row].sort(descending=True)
        assert [t.token_id for t in answer.top] == best.indices[:num].tolist()
        assert [t.logprob for t in answer.top] == pytest.approx(
            best.values[:num].tolist(), abs=1e-5
        )


def test_equal_candidates_come_in_id_order() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 700] = 1.0
    _, answers = logprobs_of(logits, [SamplingParams(temperature=0.0, top_logprobs=4)])
    assert answers[0] is not None
    assert [t.token_id for t in answers[0].top] == [700, 0, 1, 2]


def test_impossible_tokens_are_not_listed() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, [10, 20]] = torch.tensor([1.0, 0.0])
    _, answers = logprobs_of(logits, [SamplingParams(temperature=0.0, top_logprobs=5)])
    assert answers[0] is not None
    assert [t.token_id for t in answers[0].top] == [10, 20]


def test_a_vocabulary_smaller_than_asked_for_is_listed_whole() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    _, answers = logprobs_of(logits, [SamplingParams(temperature=0.0, top_logprobs=20)])
    assert answers[0] is not None
    assert [t.token_id for t in answers[0].top] == [1, 2, 0]
