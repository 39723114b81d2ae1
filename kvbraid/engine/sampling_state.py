"""What sampling remembers of a sequence, and how it becomes the rows of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbraid.engine.device_upload import uploaded
from kvbraid.engine.sampling_rows import KEEP_ALL, LogitEdits, RowGroup, SamplingRows
from kvbraid.engine.token_counts import Int64Array, SeenTokens, TokenCounts
from kvbraid.request import SamplingParams

FloatArray = NDArray[np.floating[Any]]

# Below this, scores of float32 logits would leave the range in which noise is resolved.
MIN_TEMPERATURE = 1e-5


class SequenceSampling:
    """Sampling parameters, key and token history of one sequence. Every rank keeps an equal copy.

    Tokens before num_prompt_tokens are the client's prompt, all later ones its output, also when a
    retry computes them as part of a prompt. `params.stop_token_ids` holds every id that ends it.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        key: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> None:
        """key: 64 bits, from `kvbraid.sampling_key`. token_ids: all tokens so far."""
        if not 0 <= num_prompt_tokens <= len(token_ids):
            raise ValueError(
                f"num_prompt_tokens {num_prompt_tokens} is outside [0, {len(token_ids)}]"
            )
        self.params = params
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = num_prompt_tokens
        self.signed_key = key - (1 << 64) if key >= 1 << 63 else key
        self.bias_ids: Int64Array = np.array(list(params.logit_bias), dtype=np.int64)
        self.bias_values = np.array(list(params.logit_bias.values()), dtype=np.float64)
        self.stop_ids: Int64Array = np.array(sorted(set(params.stop_token_ids)), dtype=np.int64)
        self._seen = TokenCounts()
        if params.repetition_penalty != 1.0:
            self._seen.add_prompt(token_ids[:num_prompt_tokens])
        for token_id in token_ids[num_prompt_tokens:]:
            self.append(token_id)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is drawn, without noise; ties go to the lowest id."""
        return self.params.is_greedy or self.params.top_k == 1

    @property
    def is_filtered(self) -> bool:
        """Whether tokens are filtered out before the draw."""
        return self.params.top_k is not None or self.params.top_p < 1.0 or self.params.min_p > 0.0

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the client's prompt."""
        return self.num_tokens - self.num_prompt_tokens

    def append(self, token_id: int) -> None:
        """One more output token."""
        self.num_tokens += 1
        if self.params.has_penalties:
            self._seen.add_output(token_id)

    def penalised_tokens(self, assumed: Iterable[int]) -> SeenTokens:
        """The tokens that a penalty touches, with `assumed` taken as further output."""
        return self._seen.after(assumed)

    def bans_stop(self, num_assumed: int) -> bool:
        """Whether a stop token may not come yet, num_assumed tokens after the output."""
        return self.num_output_tokens + num_assumed < self.params.min_tokens


def build_rows(
    sequences: Sequence[SequenceSampling],
    *,
    positions: Sequence[int],
    vocab_shard: range,
    device: torch.device,
    assumed: Sequence[Sequence[int]] | None = None,
) -> SamplingRows:
    """One row a sequence; a sequence may have several rows.

    positions: absolute position of the token each row draws. assumed: for each row the tokens
    taken as emitted after the sequence's last (draft tokens of a verify window), none by default.
    Raises ValueError when a position is not the sequence's length plus its assumed tokens.
    """
    guesses = [()] * len(sequences) if assumed is None else assumed
    for sequence, position, guess in zip(sequences, positions, guesses, strict=True):
        if position != sequence.num_tokens + len(guess):
            raise ValueError(
                f"position {position} must be {sequence.num_tokens} tokens + {len(guess)} assumed"
            )
    greedy: list[int] = []
    plain: list[int] = []
    filtered: list[int] = []
    for row, sequence in enumerate(sequences):
        (greedy if sequence.is_greedy else filtered if sequence.is_filtered else plain).append(row)
    return SamplingRows(
        num_rows=len(sequences),
        greedy=_greedy_rows(greedy, len(sequences), device),
        plain=_row_group(sequences, positions, plain, device),
        filtered=_row_group(sequences, positions, filtered, device),
        edits=_logit_edits(sequences, guesses, vocab_shard, device),
        top_logprobs=tuple(s.params.top_logprobs for s in sequences),
    )


def _greedy_rows(rows: list[int], num_rows: int, device: torch.device) -> Tensor | None:
    """Where all rows are greedy, nothing is looked up by them: they need not be on the device."""
    if not rows:
        return None
    return torch.tensor(rows) if len(rows) == num_rows else uploaded(torch.tensor(rows), device)


def _row_group(
    sequences: Sequence[SequenceSampling],
    positions: Sequence[int],
    rows: list[int],
    device: torch.device,
) -> RowGroup | None:
    if not rows:
        return None
    params = [sequences[row].params for row in rows]
    whole = torch.tensor(
        [
            rows,
            [sequences[row].signed_key for row in rows],
            [positions[row] for row in rows],
            [KEEP_ALL if p.top_k is None else p.top_k for p in params],
        ]
    )
    real = torch.tensor(
        [
            [max(p.temperature, MIN_TEMPERATURE) for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
        ],
        dtype=torch.float32,
    )
    whole, real = uploaded(whole, device), uploaded(real, device)
    return RowGroup(
        rows=whole[0],
        key=whole[1],
        position=whole[2],
        top_k=whole[3],
        temperature=real[0],
        top_p=real[1],
        min_p=real[2],
        has_top_k=any(p.top_k is not None for p in params),
        has_top_p=any(p.top_p < 1.0 for p in params),
    )


def _logit_edits(
    sequences: Sequence[SequenceSampling],
    guesses: Sequence[Sequence[int]],
    vocab: range,
    device: torch.device,
) -> LogitEdits | None:
    biases, penalties, bans = _Edits(vocab), _Edits(vocab), _Edits(vocab)
    for row, (sequence, guess) in enumerate(zip(sequences, guesses, strict=True)):
        params = sequence.params
        if sequence.bias_ids.size:
            biases.add(row, sequence.bias_ids, sequence.bias_values)
        if params.has_penalties:
            seen = sequence.penalised_tokens(guess)
            subtract = params.frequency_penalty * seen.counts
            subtract += params.presence_penalty * (seen.counts > 0)
            repetition = np.full(seen.ids.size, params.repetition_penalty)
            penalties.add(row, seen.ids, repetition, subtract)
        if sequence.stop_ids.size and sequence.bans_stop(len(guess)):
            bans.add(row, sequence.stop_ids)
    if not (biases.has_any or penalties.has_any or bans.has_any):
        return None
    bias_index, bias = biases.tensors(1, device)
    penalty_index, repetition_tensor, subtract_tensor = penalties.tensors(2, device)
    (banned_index,) = bans.tensors(0, device)
    return LogitEdits(
        bias_index, bias, penalty_index, repetition_tensor, subtract_tensor, banned_index
    )


class _Edits:
    """Edits of one kind, row by row: token ids and their values, cut to a vocabulary shard."""

    def __init__(self, vocab: range) -> None:
        self._vocab = vocab
        self._index: list[Int64Array] = []
        self._values: list[list[FloatArray]] = []
        self.has_any = False

    def add(self, row: int, ids: Int64Array, *values: FloatArray) -> None:
        local = (ids >= self._vocab.start) & (ids < self._vocab.stop)
        self._index.append(ids[local] + (row * len(self._vocab) - self._vocab.start))
        self._values.append([column[local] for column in values])
        self.has_any = True

    def tensors(self, num_values: int, device: torch.device) -> list[Tensor]:
        """The int64 index, then num_values float32 tensors."""
        index = np.concatenate([*self._index, np.empty(0, dtype=np.int64)])
        columns = (
            np.concatenate([*(row[i] for row in self._values), np.empty(0)])
            for i in range(num_values)
        )
        return [
            uploaded(torch.from_numpy(index), device),
            *(uploaded(torch.from_numpy(column.astype(np.float32)), device) for column in columns),
        ]
