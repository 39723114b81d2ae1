"""What the sampler promises beyond its law: ties, bad rows, independence of batch and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.layout import shard_range
from attention.single_group import SingleGroup
from kvbraid.engine.sampler import SampleResult, sample
from kvbraid.engine.sampling_state import SequenceSampling, build_rows
from kvbraid.request import SamplingParams

CPU = torch.device("cpu")
AsThreads = Callable[[int, Callable[..., Any]], list[Any]]


def make_sequences(params: Sequence[SamplingParams]) -> list[SequenceSampling]:
    return [
        SequenceSampling(
            p,
            key=row * 0x9E3779B97F4A7C15 % (1 << 64),
            token_ids=[3, 1, 4, 1, 5, 9],
            num_prompt_tokens=4,
        )
        for row, p in enumerate(params)
    ]


def draw(
    logits: Tensor, sequences: Sequence[SequenceSampling], *, group: Any = None, start: int = 0
) -> SampleResult:
    rows = build_rows(
        sequences,
        positions=[s.num_tokens for s in sequences],
        vocab_shard=range(start, start + logits.shape[1]),
        device=CPU,
    )
    return sample(logits, start, group or SingleGroup(), rows)


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(top_k=40),
    SamplingParams(top_k=1),
    SamplingParams(min_p=0.05, presence_penalty=0.5),
    SamplingParams(temperature=1.3, repetition_penalty=1.2, logit_bias={0: 2.0, 96: 4.0}),
    SamplingParams(temperature=0.0, stop_token_ids=(7, 50), min_tokens=5, frequency_penalty=1.0),
    SamplingParams(top_k=200, top_p=0.5, min_p=0.001, top_logprobs=4),
    SamplingParams(top_logprobs=0),
    SamplingParams(top_p=0.999, top_logprobs=20),
]


@pytest.mark.parametrize("vocab", [97, 1000, 2048])
@pytest.mark.parametrize("spread", [0.0, 0.05, 3.0])
def test_tokens_do_not_depend_on_the_number_of_ranks(
    vocab: int, spread: float, as_threads: AsThreads
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    params = MIXED * 4
    # spread 0: every token ties; 0.05 makes ranks disagree about sums unless they are exact.
    logits = torch.randn(len(params), vocab, generator=generator) * spread
    alone = draw(logits, make_sequences(params))
    for size in (2, 3, 4):

        def one_rank(group: Any, size: int = size) -> SampleResult:
            shard = shard_range(vocab, group.rank, size)
            part = logits[:, shard.start : shard.stop].contiguous()
            return draw(part, make_sequences(params), group=group, start=shard.start)

        for result in as_threads(size, one_rank):
            assert torch.equal(result.token_ids, alone.token_ids)
            assert result.is_valid.all()
            for got, expected in zip(result.logprobs, alone.logprobs, strict=True):
                assert (got is None) == (expected is None)
                if got is not None and expected is not None:
                    assert [t.token_id for t in got.top] == [t.token_id for t in expected.top]
                    assert [t.logprob for t in (got.chosen, *got.top)] == pytest.approx(
                        [t.logprob for t in (expected.chosen, *expected.top)], abs=1e-6
                    )


def test_a_rank_without_columns_takes_part(as_threads: AsThreads) -> None:
    params = MIXED
    logits = torch.randn(len(params), 100, generator=torch.Generator().manual_seed(5))
    alone = draw(logits, make_sequences(params))

    def one_rank(group: Any) -> SampleResult:
        part = logits[:, :100] if group.rank == 1 else logits[:, :0]
        return draw(
            part.contiguous(), make_sequences(params), group=group, start=[0, 0, 100][group.rank]
        )

    for result in as_threads(3, one_rank):
        assert torch.equal(result.token_ids, alone.token_ids)
        assert result.logprobs[8] == alone.logprobs[8]


@pytest.mark.parametrize("row", range(len(MIXED)))
def test_a_seeded_row_does_not_depend_on_its_batch(row: int) -> None:
    logits = torch.randn(len(MIXED), 1500, generator=torch.Generator().manual_seed(8)) * 2
    sequences = make_sequences(MIXED)
    together = draw(logits, sequences).token_ids
    alone = draw(logits[row : row + 1], [sequences[row]]).token_ids
    reverse = draw(logits.flip(0), sequences[::-1]).token_ids.flip(0)
    assert together[row] == alone[0] == reverse[row]


def test_top_k_one_is_greedy() -> None:
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(2))
    logits[:, 100] = logits[:, 400] = 9.0
    hot = make_sequences([SamplingParams(temperature=1.9, top_k=1)] * 64)
    assert draw(logits, hot).token_ids.tolist() == [100] * 64


@pytest.mark.parametrize("vocab", [5, 64, 100, 200, 49_152])
def test_greedy_is_argmax_with_ties_to_the_lowest_id(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(0, 4, (200, vocab), generator=generator).float()
    expected = [row.tolist().index(row.max().item()) for row in logits]
    got = draw(logits, make_sequences([SamplingParams(temperature=0.0)] * 200)).token_ids
    assert got.tolist() == expected


def test_tie_across_shards_goes_to_the_lowest_id(as_threads: AsThreads) -> None:
    """Near-ties must not let ranks pick their own favourite (a public deadlock)."""
    logits = torch.zeros(1, 12)

    def one_rank(group: Any) -> int:
        part = logits[:, group.rank * 4 : group.rank * 4 + 4].contiguous()
        sequences = make_sequences([SamplingParams(temperature=0.0)])
        return int(draw(part, sequences, group=group, start=group.rank * 4).token_ids)

    assert as_threads(3, one_rank) == [0, 0, 0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.9, top_logprobs=3),
        SamplingParams(min_p=0.1),
    ],
)
@pytest.mark.parametrize("poison", ["nan", "all nan", "no token", "+inf"])
def test_a_bad_row_is_marked_and_harms_no_other(params: SamplingParams, poison: str) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(4))
    sequences = make_sequences([params] * 3)
    healthy = draw(logits, sequences)
    bad = logits.clone()
    if poison == "nan":
        bad[1, 200] = torch.nan
    else:
        bad[1] = {"all nan": torch.nan, "no token": -torch.inf, "+inf": torch.inf}[poison]
    result = draw(bad, sequences)
    assert healthy.is_valid.tolist() == [True, True, True]
    assert result.is_valid.tolist() == [True, False, True]
    assert result.token_ids[[0, 2]].tolist() == healthy.token_ids[[0, 2]].tolist()
    assert result.token_ids[1] == 0
    assert result.logprobs[1] is None
    assert result.logprobs[0] == healthy.logprobs[0]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.9999)])
def test_padding_of_minus_infinity_is_never_drawn(params: SamplingParams) -> None:
    logits = torch.full((500, 70), -torch.inf)
    logits[:, [3, 66]] = 0.0
    tokens = set(draw(logits, make_sequences([params] * 500)).token_ids.tolist())
    assert tokens == {3, 66}


def test_stop_tokens_wait_for_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(6,))
    logits = torch.zeros(1, 10)
    logits[0, 6], logits[0, 8] = 5.0, 4.0
    sequence = SequenceSampling(params, key=1, token_ids=[1, 2], num_prompt_tokens=2)
    drawn = []
    for _ in range(4):
        token = int(draw(logits, [sequence]).token_ids)
        sequence.append(token)
        drawn.append(token)
    assert drawn == [8, 8, 6, 6]


def test_a_tiny_temperature_is_nearly_greedy_and_finite() -> None:
    logits = torch.randn(100, 400, generator=torch.Generator().manual_seed(6)) * 5
    cold = make_sequences([SamplingParams(temperature=1e-30)] * 100)
    result = draw(logits, cold)
    assert result.is_valid.all()
    assert result.token_ids.tolist() == logits.argmax(1).tolist()


def test_logits_that_do_not_fit_are_refused() -> None:
    sequences = make_sequences(MIXED[:2])
    with pytest.raises(ValueError, match=r"\(3, 50\)"):
        draw(torch.zeros(3, 50), sequences)
    with pytest.raises(ValueError, match="bfloat16"):
        draw(torch.zeros(2, 50, dtype=torch.bfloat16), sequences)
