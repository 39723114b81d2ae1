"""What sampling remembers of a sequence survives retries, windows and growth."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kvbraid.engine.sampling_rows import KEEP_ALL
from kvbraid.engine.sampling_state import SequenceSampling, build_rows
from kvbraid.request import SamplingParams

CPU = torch.device("cpu")
PENALISED = SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.25)


def seen(sequence: SequenceSampling, assumed: tuple[int, ...] = ()) -> dict[int, int]:
    tokens = sequence.penalised_tokens(assumed)
    assert len(set(tokens.ids.tolist())) == len(tokens.ids)
    return dict(zip(tokens.ids.tolist(), tokens.counts.tolist(), strict=True))


def test_counts_are_of_the_output_and_ids_of_everything() -> None:
    prompt, output = [5, 6, 5, 7], [7, 8, 8, 5]
    sequence = SequenceSampling(PENALISED, key=1, token_ids=prompt, num_prompt_tokens=4)
    for token in output:
        sequence.append(token)
    assert seen(sequence) == {5: 1, 6: 0, 7: 1, 8: 2}
    assert (sequence.num_tokens, sequence.num_output_tokens) == (8, 4)


def test_a_retry_counts_emitted_tokens_as_output() -> None:
    prompt, output = [5, 6, 5, 7], [7, 8, 8, 5]
    first = SequenceSampling(PENALISED, key=1, token_ids=prompt, num_prompt_tokens=4)
    for token in output:
        first.append(token)
    retry = SequenceSampling(PENALISED, key=1, token_ids=prompt + output, num_prompt_tokens=4)
    assert seen(retry) == seen(first)
    assert retry.num_output_tokens == 4
    assert not retry.bans_stop(0)


def test_prompt_tokens_are_left_out_when_only_the_output_is_penalised() -> None:
    params = SamplingParams(presence_penalty=1.0)
    sequence = SequenceSampling(params, key=1, token_ids=[5, 6, 9], num_prompt_tokens=2)
    assert seen(sequence) == {9: 1}


def test_assumed_tokens_count_for_their_row_only() -> None:
    sequence = SequenceSampling(PENALISED, key=1, token_ids=[5, 6, 5], num_prompt_tokens=2)
    assert seen(sequence, (5, 9, 9)) == {5: 2, 6: 0, 9: 2}
    assert seen(sequence) == {5: 1, 6: 0}


def test_counts_survive_growth() -> None:
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 5000, (3000,), generator=generator).tolist()
    output = torch.randint(0, 5000, (3000,), generator=generator).tolist()
    sequence = SequenceSampling(PENALISED, key=1, token_ids=prompt, num_prompt_tokens=3000)
    for token in output:
        sequence.append(token)
    counts = Counter(output)
    assert seen(sequence) == {token: counts[token] for token in {*prompt, *output}}


@pytest.mark.parametrize("num_prompt_tokens", [-1, 4])
def test_prompt_longer_than_the_tokens_is_refused(num_prompt_tokens: int) -> None:
    with pytest.raises(ValueError, match=str(num_prompt_tokens)):
        SequenceSampling(PENALISED, key=1, token_ids=[1, 2, 3], num_prompt_tokens=num_prompt_tokens)


def test_rows_are_grouped_by_the_work_they_need() -> None:
    params = [
        SamplingParams(top_p=0.5),
        SamplingParams(temperature=0.0, top_p=0.5),
        SamplingParams(),
        SamplingParams(top_k=1),
        SamplingParams(top_k=7, min_p=0.25, temperature=0.5),
    ]
    sequences = [
        SequenceSampling(p, key=(1 << 64) - 1 - row, token_ids=[1] * (row + 1), num_prompt_tokens=1)
        for row, p in enumerate(params)
    ]
    rows = build_rows(sequences, positions=[1, 2, 3, 4, 5], vocab_shard=range(9), device=CPU)
    assert rows.greedy is not None
    assert rows.plain is not None
    assert rows.filtered is not None
    assert rows.greedy.tolist() == [1, 3]
    assert rows.plain.rows.tolist() == [2]
    assert rows.filtered.rows.tolist() == [0, 4]
    assert rows.filtered.key.tolist() == [-1, -5]
    assert rows.filtered.position.tolist() == [1, 5]
    assert rows.filtered.top_k.tolist() == [KEEP_ALL, 7]
    assert rows.filtered.top_p.tolist() == [0.5, 1.0]
    assert rows.filtered.min_p.tolist() == [0.0, 0.25]
    assert rows.filtered.temperature.tolist() == [1.0, 0.5]
    assert rows.edits is None


def test_edits_are_cut_to_the_shard() -> None:
    params = SamplingParams(
        logit_bias={2: 1.0, 11: 2.0}, presence_penalty=0.5, stop_token_ids=(9, 12), min_tokens=5
    )
    sequence = SequenceSampling(params, key=1, token_ids=[1, 10, 3], num_prompt_tokens=1)
    rows = build_rows(
        [sequence, sequence],
        positions=[3, 4],
        vocab_shard=range(8, 12),
        device=CPU,
        assumed=[(), (11,)],
    )
    assert rows.edits is not None
    assert rows.edits.bias_index.tolist() == [3, 7]
    assert rows.edits.bias.tolist() == [2.0, 2.0]
    assert rows.edits.penalty_index.tolist() == [2, 6, 7]
    assert rows.edits.subtract.tolist() == [0.5, 0.5, 0.5]
    assert rows.edits.repetition.tolist() == [1.0, 1.0, 1.0]
    assert rows.edits.banned_index.tolist() == [1, 5]


def test_a_ban_ends_inside_a_window() -> None:
    params = SamplingParams(temperature=0.0, stop_token_ids=(2,), min_tokens=3)
    sequence = SequenceSampling(params, key=1, token_ids=[1, 5, 5], num_prompt_tokens=1)
    rows = build_rows(
        [sequence] * 3,
        positions=[3, 4, 5],
        vocab_shard=range(4),
        device=CPU,
        assumed=[(), (5,), (5, 5)],
    )
    assert rows.edits is not None
    assert rows.edits.banned_index.tolist() == [2]


def test_a_position_that_is_not_the_next_one_is_refused() -> None:
    sequence = SequenceSampling(SamplingParams(), key=1, token_ids=[1, 5], num_prompt_tokens=1)
    with pytest.raises(ValueError, match="position 3 must be 2 tokens"):
        build_rows([sequence], positions=[3], vocab_shard=range(4), device=CPU)
