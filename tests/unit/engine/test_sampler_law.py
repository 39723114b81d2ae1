"""Sampled tokens follow the distribution that the parameters describe, also jointly."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from attention.single_group import SingleGroup
from kvbraid.engine.sampler import sample
from kvbraid.engine.sampling_rows import RowGroup, SamplingRows
from kvbraid.engine.sampling_state import SequenceSampling, build_rows
from kvbraid.request import SamplingParams
from kvbraid.sampling_key import sampling_key
from kvbraid.sampling_noise import hash_words, negative_gumbel, row_words, token_words

CPU = torch.device("cpu")


def chi_square_limit(freedom: int) -> float:
    """What a chi-square variable exceeds with probability 1e-9."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        shape, scale = torch.tensor([freedom / 2, middle / 2], dtype=torch.float64)
        low, high = (
            (middle, high) if torch.special.gammaincc(shape, scale) > 1e-9 else (low, middle)
        )
    return high


@pytest.mark.parametrize(("freedom", "limit"), [(2, 41.4), (7, 55.9), (15, 73.6), (63, 155.1)])
def test_limits_are_the_published_quantiles(freedom: int, limit: float) -> None:
    assert chi_square_limit(freedom) == pytest.approx(limit, abs=0.1)


def chi_square(tokens: Tensor, probs: Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom; cells expected less than 5 times are pooled."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    expected = probs.double() * len(tokens)
    assert counts[probs == 0].sum() == 0, "a token of probability 0 was drawn"
    large = expected >= 5
    pooled_counts = torch.cat((counts[large], counts[~large].sum()[None]))
    pooled = torch.cat((expected[large], expected[~large].sum()[None]))
    used = pooled > 1e-9
    statistic = ((pooled_counts - pooled) ** 2 / pooled)[used].sum().item()
    return statistic, int(used.sum()) - 1


def fits(tokens: Tensor, probs: Tensor) -> bool:
    statistic, freedom = chi_square(tokens, probs)
    return statistic < chi_square_limit(freedom)


def many_rows(params: SamplingParams, keys: Tensor, positions: Tensor) -> SamplingRows:
    """One row a key and position, all with the same parameters and no history."""
    sequence = SequenceSampling(params, key=0, token_ids=[0], num_prompt_tokens=1)
    rows = build_rows([sequence], positions=[1], vocab_shard=range(8), device=CPU)

    def widen(group: RowGroup | None) -> RowGroup | None:
        if group is None:
            return None
        whole = {
            field.name: value.expand(len(keys)).contiguous()
            for field in dataclasses.fields(group)
            if isinstance(value := getattr(group, field.name), Tensor)
        }
        whole |= {"rows": torch.arange(len(keys)), "key": keys, "position": positions}
        return dataclasses.replace(group, **whole)

    return dataclasses.replace(
        rows,
        num_rows=len(keys),
        plain=widen(rows.plain),
        filtered=widen(rows.filtered),
        top_logprobs=(None,) * len(keys),
    )


def draw(logits: Tensor, params: SamplingParams, keys: Tensor, positions: Tensor) -> Tensor:
    tokens = []
    size = 20_000 if params == SamplingParams() else 250
    for part in zip(keys.split(size), positions.split(size), strict=True):
        rows = many_rows(params, *part)
        batch = logits.expand(rows.num_rows, -1).contiguous()
        tokens.append(sample(batch, 0, SingleGroup(), rows).token_ids)
    return torch.cat(tokens)


LOGITS = torch.tensor([1.2, -0.3, 0.8, 2.0, -1.5, 0.0, 0.4, -0.9])
NUM_DRAWS = 100_000


@pytest.mark.parametrize("vary", ["keys", "positions", "both"])
def test_plain_sampling_follows_softmax(vary: str) -> None:
    counter = torch.arange(NUM_DRAWS)
    fixed = torch.full_like(counter, 12345)
    keys = fixed if vary == "positions" else counter
    positions = fixed if vary == "keys" else counter
    tokens = draw(LOGITS, SamplingParams(), keys, positions)
    assert fits(tokens, LOGITS.softmax(0))
    # The control: the same draws do not fit a law that is off by a few percent.
    assert not fits(tokens, (LOGITS * 1.05).softmax(0))


@pytest.mark.parametrize(
    ("params", "probs"),
    [
        (SamplingParams(temperature=0.6), (LOGITS / 0.6).softmax(0)),
        (SamplingParams(temperature=1.7), (LOGITS / 1.7).softmax(0)),
        (SamplingParams(top_k=3), torch.where(LOGITS >= 0.8, LOGITS, -torch.inf).softmax(0)),
        # Softmax masses, best first: .421 .189 .127 .085 .057 ...: 3 tokens reach 0.7.
        (SamplingParams(top_p=0.7), torch.where(LOGITS >= 0.8, LOGITS, -torch.inf).softmax(0)),
        (SamplingParams(min_p=0.2), torch.where(LOGITS >= 0.4, LOGITS, -torch.inf).softmax(0)),
        (
            SamplingParams(temperature=2.0, top_k=5, top_p=0.8, min_p=0.1),
            torch.where(LOGITS >= 0.4, LOGITS / 2, -torch.inf).softmax(0),
        ),
    ],
)
def test_temperature_and_filters_give_the_renormalised_softmax(
    params: SamplingParams, probs: Tensor
) -> None:
    num_draws = 20_000
    tokens = draw(LOGITS, params, torch.arange(num_draws), torch.full((num_draws,), 77))
    assert fits(tokens, probs)
    assert not fits(tokens, (probs.log() * 1.3).softmax(0))


def test_penalties_and_bias_shift_the_law() -> None:
    num_draws = 20_000
    params = SamplingParams(
        temperature=0.8,
        repetition_penalty=1.4,
        presence_penalty=0.3,
        frequency_penalty=0.25,
        logit_bias={6: 1.1},
        stop_token_ids=(2,),
        min_tokens=9,
    )
    prompt, output = [0, 1, 1], [3, 3, 5]
    sequences = [
        SequenceSampling(params, key=key, token_ids=prompt + output, num_prompt_tokens=3)
        for key in range(num_draws)
    ]
    rows = build_rows(sequences, positions=[6] * num_draws, vocab_shard=range(8), device=CPU)
    tokens = sample(LOGITS.expand(num_draws, -1).contiguous(), 0, SingleGroup(), rows).token_ids
    # By hand: 0 and 1 are in the prompt, 3 twice and 5 once in the output, 2 is banned.
    edited = torch.tensor(
        [1.2 / 1.4, -0.3 * 1.4, -torch.inf, 2.0 / 1.4 - 0.8, -1.5, -0.55, 1.5, -0.9]
    )
    assert fits(tokens, (edited / 0.8).softmax(0))
    assert not fits(tokens, (LOGITS / 0.8).softmax(0))


@pytest.mark.parametrize("pair", ["next position", "next completion", "next seed"])
def test_pairs_of_draws_are_independent(pair: str) -> None:
    seeds = range(NUM_DRAWS)
    first_keys = torch.tensor([_signed(sampling_key(seed, 0)) for seed in seeds])
    positions = torch.full((NUM_DRAWS,), 40)
    second_keys, second_positions = first_keys, positions
    if pair == "next position":
        second_positions = positions + 1
    elif pair == "next completion":
        second_keys = torch.tensor([_signed(sampling_key(seed, 1)) for seed in seeds])
    else:
        second_keys = torch.tensor([_signed(sampling_key(seed + 1, 0)) for seed in seeds])
    first = draw(LOGITS, SamplingParams(), first_keys, positions)
    second = draw(LOGITS, SamplingParams(), second_keys, second_positions)
    probs = LOGITS.softmax(0)
    assert fits(first * 8 + second, torch.outer(probs, probs).flatten())
    # The control: a draw that reuses the noise is far from independent.
    assert not fits(first * 8 + first, torch.outer(probs, probs).flatten() + 1e-12)


def test_coupled_drafts_keep_the_law_and_the_biased_variants_do_not() -> None:
    keys = torch.arange(NUM_DRAWS)
    positions = torch.full_like(keys, 9)
    words = row_words(keys, positions)
    noise = -negative_gumbel(hash_words(token_words(0, 8, CPU), words.a[:, None], words.b[:, None]))
    draft_logits = LOGITS.flip(0) * 0.7
    p, q = LOGITS.softmax(0), draft_logits.softmax(0)
    target = draw(LOGITS, SamplingParams(), keys, positions)
    assert torch.equal(target, (LOGITS + noise).argmax(1)), "drafts would not share the noise"
    draft = (draft_logits + noise).argmax(1)
    agreement = (draft == target).double().mean().item()
    variation = 0.5 * (p - q).abs().sum().item()
    assert (1 - variation) / (1 + variation) - 0.01 < agreement < 1 - variation + 0.01
    assert fits(torch.where(draft == target, draft, target), p)

    fresh = draw(LOGITS, SamplingParams(), keys, positions + 1)
    assert not fits(torch.where(draft == target, draft, fresh), p)
    uniform = torch.rand(NUM_DRAWS, generator=torch.Generator().manual_seed(1))
    residual = ((p - q).clamp(min=0).log() + noise).argmax(1)
    accepted = uniform < (p / q)[draft]
    assert not fits(torch.where(accepted, draft, residual), p)


def _signed(key: int) -> int:
    return key - (1 << 64) if key >= 1 << 63 else key
