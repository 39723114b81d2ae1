"""The sampler's filters and logit edits against a slow float64 reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attention.layout import shard_range
from attention.single_group import SingleGroup
from kvbraid.engine.filters import filter_tokens
from kvbraid.engine.sampler import sample
from kvbraid.engine.sampling_state import SequenceSampling, build_rows
from kvbraid.request import SamplingParams

CPU = torch.device("cpu")
VOCAB = 3000  # not a multiple of a block


def reference_logits(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    """Bias, penalties and ban of stop tokens, in Python floats."""
    edited = list(logits)
    for token, bias in params.logit_bias.items():
        edited[token] += bias
    counts = Counter(output)
    for token in set(prompt) | set(output):
        value = edited[token]
        r = params.repetition_penalty
        value = value / r if value > 0 else value * r
        value -= params.frequency_penalty * counts[token]
        value -= params.presence_penalty * (counts[token] > 0)
        edited[token] = value
    if len(output) < params.min_tokens:
        for token in params.stop_token_ids:
            edited[token] = -float("inf")
    return edited


def reference_support(scaled: torch.Tensor, params: SamplingParams) -> tuple[set[int], set[int]]:
    """Tokens that surely stay, and that may stay, of one float64 row; the difference is what a
    relative error of 1e-6 in a sum of probabilities can move."""
    bounds = []
    for slack in (1e-6, -1e-6):
        keep = torch.ones_like(scaled, dtype=torch.bool)
        if params.top_k is not None and params.top_k < len(scaled):
            keep &= scaled >= scaled.sort(descending=True).values[params.top_k - 1]
        probs = torch.where(keep, scaled, -torch.inf).softmax(0)
        if params.top_p < 1.0:
            best = probs.sort(descending=True).values
            before = best.cumsum(0) - best
            weakest = best[(before < params.top_p - slack).nonzero()[-1]]
            keep &= probs >= weakest
        keep &= probs >= params.min_p * probs.max() * (1 + slack)
        bounds.append(set(keep.nonzero().flatten().tolist()))
    sure, possible = bounds
    return sure, possible


def kept_tokens(logits: torch.Tensor, params: list[SamplingParams]) -> list[set[int]]:
    sequences = [
        SequenceSampling(p, key=row, token_ids=[0], num_prompt_tokens=1)
        for row, p in enumerate(params)
    ]
    rows = build_rows(
        sequences, positions=[1] * len(params), vocab_shard=range(logits.shape[1]), device=CPU
    )
    assert rows.filtered is not None
    assert rows.filtered.rows.tolist() == list(range(len(params)))
    scaled = logits / rows.filtered.temperature[:, None]
    found = filter_tokens(scaled, rows.filtered, SingleGroup())
    assert torch.equal(found.values, scaled[found.rows, found.columns])
    return [set(found.columns[found.rows == row].tolist()) for row in range(len(params))]


FILTERS = [
    SamplingParams(top_k=2),
    SamplingParams(top_k=50),
    SamplingParams(top_k=777),
    SamplingParams(top_k=VOCAB - 1),
    SamplingParams(top_k=VOCAB + 5, top_p=0.5),
    SamplingParams(top_p=0.01),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.999),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=1.0),
    SamplingParams(min_p=1e-6),
    SamplingParams(top_k=40, top_p=0.9),
    SamplingParams(top_k=40, top_p=0.3),
    SamplingParams(top_k=1000, top_p=0.95, min_p=0.01),
    SamplingParams(top_p=0.95, min_p=0.02),
    SamplingParams(top_k=20, min_p=0.2),
    SamplingParams(temperature=0.3, top_k=40, top_p=0.8, min_p=0.001),
    SamplingParams(temperature=2.0, top_p=0.7),
]


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 12.0])
def test_every_filter_keeps_what_the_reference_keeps(spread: float) -> None:
    generator = torch.Generator().manual_seed(int(spread * 100))
    logits = torch.randn(len(FILTERS), VOCAB, generator=generator) * spread
    # All filters in one batch: a stage that one row needs must not touch the others.
    kept = kept_tokens(logits, FILTERS)
    for row, params in enumerate(FILTERS):
        scaled = (logits[row] / params.temperature).double()
        sure, possible = reference_support(scaled, params)
        # Rows drop tokens 31 nats below the best one, which no probability can show.
        deep = set((scaled < scaled.max() - 30.99).nonzero().flatten().tolist())
        assert sure - deep <= kept[row] <= possible, params


def test_filter_of_one_row_alone_equals_the_batch() -> None:
    logits = torch.randn(len(FILTERS), VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    together = kept_tokens(logits, FILTERS)
    alone = [kept_tokens(logits[row : row + 1], [p])[0] for row, p in enumerate(FILTERS)]
    assert together == alone


def test_support_is_equal_for_any_number_of_ranks(
    as_threads: Callable[[int, Callable[..., Any]], list[Any]],
) -> None:
    """Nearly equal tokens, and a threshold among tokens so unlikely that float32 sums would lose
    them: a sum that depends on its order would move the threshold."""
    num_rows, vocab = 48, 12_000
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(9)) * 0.3
    logits[2::3] -= 19.0
    logits[2::3, ::3000] = 0.0
    params = [
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=9000, top_p=0.7),
        SamplingParams(top_p=1.0 - 1e-5),
    ] * (num_rows // 3)
    sequences = [SequenceSampling(p, key=1, token_ids=[0], num_prompt_tokens=1) for p in params]
    rows = build_rows(sequences, positions=[1] * num_rows, vocab_shard=range(vocab), device=CPU)
    group_of_rows = rows.filtered
    assert group_of_rows is not None
    alone = filter_tokens(logits, group_of_rows, SingleGroup())
    expected = set(zip(alone.rows.tolist(), alone.columns.tolist(), strict=True))
    assert 0.3 < len(expected) / logits.numel() < 0.8
    assert len({(row, column) for row, column in expected if row % 3 == 2}) > 16 * 1000
    for size in (2, 3):

        def one_rank(group: Any, size: int = size) -> set[tuple[int, int]]:
            shard = shard_range(vocab, group.rank, size)
            part = logits[:, shard.start : shard.stop].contiguous()
            found = filter_tokens(part, group_of_rows, group)
            columns = (found.columns + shard.start).tolist()
            return set(zip(found.rows.tolist(), columns, strict=True))

        assert set().union(*as_threads(size, one_rank)) == expected


@pytest.mark.parametrize("params", [SamplingParams(top_k=3), SamplingParams(top_p=0.3)])
def test_ties_with_the_threshold_stay(params: SamplingParams) -> None:
    logits = torch.full((1, 100), -5.0)
    logits[0, [7, 80]] = 2.0
    logits[0, [3, 40, 64, 99]] = 1.0
    assert kept_tokens(logits, [params]) == [{7, 80} | ({3, 40, 64, 99} if params.top_k else set())]


def test_equal_logits_all_stay() -> None:
    logits = torch.zeros(2, 500)
    assert (
        kept_tokens(logits, [SamplingParams(top_k=5), SamplingParams(top_p=0.1)])
        == [set(range(500))] * 2
    )


def test_zeros_of_both_signs_are_ties() -> None:
    logits = torch.tensor([[0.0, -0.0, -1.0, -0.0]])
    assert kept_tokens(logits, [SamplingParams(top_k=2)]) == [{0, 1, 3}]


def test_banned_tokens_never_stay() -> None:
    logits = torch.full((2, 300), -torch.inf)
    logits[:, [5, 290]] = torch.tensor([1.0, 0.0])
    assert (
        kept_tokens(logits, [SamplingParams(top_k=50), SamplingParams(top_p=0.9999)])
        == [{5, 290}] * 2
    )


EDITS = [
    SamplingParams(temperature=0.0, logit_bias={5: 3.0, 2999: -100.0, 0: 1.5}),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, repetition_penalty=0.5),
    SamplingParams(temperature=0.0, presence_penalty=1.5),
    SamplingParams(temperature=0.0, frequency_penalty=0.7),
    SamplingParams(temperature=0.0, frequency_penalty=-2.0, presence_penalty=-1.0),
    SamplingParams(
        temperature=0.0,
        logit_bias={17: 9.0, 2000: -3.0},
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        stop_token_ids=(17, 8),
        min_tokens=60,
    ),
]


@pytest.mark.parametrize("params", EDITS)
def test_bias_penalties_and_bans_follow_the_reference(params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(11)
    vocab, num_rows = 3000, 40
    logits = torch.randn(num_rows, vocab, generator=generator) * 2
    # Seen tokens are also the likely ones, so that penalties decide the argmax; in every other row
    # without the likeliest, which a reward for repetition can overtake.
    likely = [row.topk(13).indices.tolist()[i % 2 : 12] for i, row in enumerate(logits)]
    prompts = [[*ids[::2], 4, 4] for ids in likely]
    outputs = [ids[1::3] + ids[:2] + ids[:1] * (row % 4) for row, ids in enumerate(likely)]
    sequences = [
        SequenceSampling(params, key=1, token_ids=p + o, num_prompt_tokens=len(p))
        for p, o in zip(prompts, outputs, strict=True)
    ]
    rows = build_rows(
        sequences,
        positions=[s.num_tokens for s in sequences],
        vocab_shard=range(vocab),
        device=CPU,
    )
    before = logits.clone()
    got = sample(logits, 0, SingleGroup(), rows).token_ids.tolist()
    assert torch.equal(logits, before), "the caller's logits were modified"
    edited = [
        reference_logits(logits[row].tolist(), params, prompts[row], outputs[row])
        for row in range(num_rows)
    ]
    assert got == [max(range(vocab), key=row.__getitem__) for row in edited]
    assert got != logits.argmax(1).tolist(), "the edits decided nothing: the test is blind"
