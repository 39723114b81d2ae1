"""Draws the next token of every row: a pure function of (logits, parameters, key, position).

Order: logit bias, penalties, ban of stop tokens, temperature, top-k, top-p, min-p, then the token
with the highest logit + Gumbel noise; the noise is `kvbraid.sampling_noise`. Each rank looks at its
vocabulary shard only; (score, id) pairs are gathered and every rank takes the same one, ties going
to the lowest id. The token does not depend on the other rows, on the number of ranks, or on what
the other rows need.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention.interface import Group
from kvbraid.engine.filters import filter_tokens
from kvbraid.engine.logprobs import position_logprobs
from kvbraid.engine.row_scan import first_maximum, row_parts, take_rows
from kvbraid.engine.sampling_rows import LogitEdits, RowGroup, SamplingRows
from kvbraid.request import PositionLogprobs
from kvbraid.sampling_noise import hash_words, negative_gumbel, row_words, token_words

_NO_COLUMN = (1 << 31) - 1


class SampleResult(NamedTuple):
    """What `sample` chose; equal on every rank.

    token_ids: int64 [N], on the CPU. is_valid: bool [N], on the CPU; false where the row's logits
    hold NaN or +inf or allow no token: its token id is 0 and means nothing. logprobs: one entry a
    row, None where none were asked for or the row is not valid.
    """

    token_ids: Tensor
    is_valid: Tensor
    logprobs: list[PositionLogprobs | None]


class _Best(NamedTuple):
    """Per row the best token of this shard. scores: float32; columns: int64, _NO_COLUMN if none."""

    scores: Tensor
    columns: Tensor


def sample(logits: Tensor, vocab_start: int, group: Group, rows: SamplingRows) -> SampleResult:
    """The next token of each row.

    logits: float32 [N, V_local], this rank's shard of the vocabulary, whose first id is
    vocab_start; not modified. Shards follow each other in rank order. `rows` is equal on all ranks
    but for the shard in its edits. Every rank of the group calls this in lockstep.
    Raises ValueError when logits do not fit the rows.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.shape[0] != rows.num_rows:
        raise ValueError(
            f"logits {tuple(logits.shape)} {logits.dtype} must be [{rows.num_rows}, V] float32"
        )
    edited = logits if rows.edits is None else _edit(logits, rows.edits)
    best = _draw(edited, rows, vocab_start, group)
    token_ids, is_valid = _agree(best, vocab_start, group)
    return SampleResult(
        token_ids,
        is_valid,
        position_logprobs(logits, vocab_start, group, token_ids, is_valid, rows.top_logprobs),
    )


def target_scores(logits: Tensor, vocab_start: int, group: Group, rows: SamplingRows) -> Tensor:
    """Logarithm of the law that `sample` draws each row from, up to a constant of the row.

    As `sample`; no row is greedy. float32 [N, V_local], -inf for tokens that are never drawn.
    Raises ValueError for a greedy row, which has no noise and therefore no law.
    """
    if rows.greedy is not None:
        raise ValueError(f"rows {rows.greedy.tolist()} are greedy")
    edited = logits if rows.edits is None else _edit(logits, rows.edits)
    scores = torch.empty_like(logits)
    if rows.plain is not None:
        plain = take_rows(edited, rows.plain.rows) / rows.plain.temperature[:, None]
        scores[rows.plain.rows] = plain
    if rows.filtered is not None:
        scaled = take_rows(edited, rows.filtered.rows) / rows.filtered.temperature[:, None]
        kept = filter_tokens(scaled, rows.filtered, group)
        filtered = torch.full_like(scaled, -torch.inf)
        filtered[kept.rows, kept.columns] = kept.values
        scores[rows.filtered.rows] = filtered
    return scores


def _edit(logits: Tensor, edits: LogitEdits) -> Tensor:
    flat = logits.clone(memory_format=torch.contiguous_format).view(-1)
    flat.index_add_(0, edits.bias_index, edits.bias)
    values = flat[edits.penalty_index]
    values = torch.where(values > 0, values / edits.repetition, values * edits.repetition)
    flat.index_copy_(0, edits.penalty_index, values - edits.subtract)
    flat.index_fill_(0, edits.banned_index, -torch.inf)
    return flat.view(logits.shape)


def _draw(logits: Tensor, rows: SamplingRows, vocab_start: int, group: Group) -> _Best:
    parts: list[tuple[Tensor, _Best]] = []
    if rows.greedy is not None:
        parts.append((rows.greedy, _first_maximum(take_rows(logits, rows.greedy))))
    if rows.plain is not None:
        parts.append((rows.plain.rows, _draw_plain(logits, rows.plain, vocab_start)))
    if rows.filtered is not None:
        parts.append(
            (rows.filtered.rows, _draw_filtered(logits, rows.filtered, vocab_start, group))
        )
    if len(parts) == 1:
        return parts[0][1]  # of all rows, in their order
    best = _Best(
        torch.full((rows.num_rows,), -torch.inf, device=logits.device),
        torch.full((rows.num_rows,), _NO_COLUMN, device=logits.device),
    )
    for index, part in parts:
        best.scores[index] = part.scores
        best.columns[index] = part.columns
    return best


def _first_maximum(scores: Tensor) -> _Best:
    if scores.shape[1] > 0:
        return _Best(*first_maximum(scores))
    none = torch.full((len(scores),), _NO_COLUMN, device=scores.device)
    return _Best(scores.new_full((len(scores),), -torch.inf), none)


def _draw_plain(logits: Tensor, params: RowGroup, vocab_start: int) -> _Best:
    chosen = take_rows(logits, params.rows)
    tokens = token_words(vocab_start, vocab_start + chosen.shape[1], logits.device)
    words = row_words(params.key, params.position)
    parts = []
    for part in row_parts(chosen):
        scores = chosen[part] / params.temperature[part, None]
        scores -= negative_gumbel(hash_words(tokens, words.a[part, None], words.b[part, None]))
        parts.append(_first_maximum(scores))
    return _Best(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _draw_filtered(logits: Tensor, params: RowGroup, vocab_start: int, group: Group) -> _Best:
    scaled = take_rows(logits, params.rows) / params.temperature[:, None]
    kept = filter_tokens(scaled, params, group)
    tokens = token_words(vocab_start, vocab_start + scaled.shape[1], logits.device)
    words = row_words(params.key, params.position)
    h = hash_words(tokens[kept.columns], words.a[kept.rows], words.b[kept.rows])
    scores = kept.values - negative_gumbel(h)
    highest = scores.new_full((len(scaled),), -torch.inf)
    highest.scatter_reduce_(0, kept.rows, scores, "amax")
    wins = scores == highest[kept.rows]
    columns = torch.full((len(scaled),), _NO_COLUMN, device=logits.device)
    columns.scatter_reduce_(0, kept.rows[wins], kept.columns[wins], "amin")
    return _Best(highest, columns)


def _agree(best: _Best, vocab_start: int, group: Group) -> tuple[Tensor, Tensor]:
    """The best token over all shards: ids and whether they are valid, both [N] on the CPU."""
    columns = best.columns + vocab_start if vocab_start else best.columns
    # float64 holds both exactly.
    pairs = torch.empty(2, len(columns), dtype=torch.float64, device=columns.device)
    pairs[0], pairs[1] = best.scores, columns
    gathered = group.all_gather(pairs).cpu().numpy()
    scores, ids = gathered[:, 0], gathered[:, 1]
    highest = scores.max(axis=0)
    lowest_id = np.where(scores == highest, ids, np.inf).min(axis=0)
    is_valid = np.isfinite(highest)
    token_ids = np.where(is_valid, lowest_id, 0.0).astype(np.int64)
    return torch.from_numpy(token_ids), torch.from_numpy(is_valid)
