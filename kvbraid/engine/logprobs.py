"""Log-probabilities of the model's own distribution, over a sharded vocabulary."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attention.interface import Group
from kvbraid.engine.row_scan import at_least, block_maxima, kth_largest_bound, take_rows
from kvbraid.request import PositionLogprobs, TokenLogprob


class _ShardRows(NamedTuple):
    """What a rank knows about the R rows that want log-probabilities, float64.

    maximum, exp_sum (of logits minus the maximum), chosen (its logit, -inf on other shards): [R].
    values, ids: [R, most], best first, lowest id first among equals; -inf where there are none.
    """

    maximum: Tensor
    exp_sum: Tensor
    chosen: Tensor
    values: Tensor
    ids: Tensor


def position_logprobs(
    logits: Tensor,
    vocab_start: int,
    group: Group,
    token_ids: Tensor,
    is_valid: Tensor,
    num_top: tuple[int | None, ...],
) -> list[PositionLogprobs | None]:
    """Log-softmax of the raw logits at the chosen token and the num_top[row] likeliest ones.

    logits: float32 [N, V_local] before bias, penalties, temperature and filters. token_ids int64,
    is_valid bool: [N] on the CPU, equal on all ranks. None for rows whose num_top is None or that
    are not valid. One collective, none when no row asks.
    """
    wanted = [row for row, num in enumerate(num_top) if num is not None and bool(is_valid[row])]
    answers: list[PositionLogprobs | None] = [None] * len(num_top)
    if not wanted:
        return answers
    most = max(num or 0 for num in num_top)
    chosen_ids = token_ids[wanted].tolist()
    shard_rows = take_rows(logits, torch.tensor(wanted, device=logits.device))
    mine = _look(shard_rows, chosen_ids, vocab_start, most)
    gathered = group.all_gather(torch.cat((torch.stack(mine[:3], dim=1), *mine[3:]), dim=1)).cpu()
    maximum = gathered[:, :, 0].amax(dim=0)
    exp_sum = (gathered[:, :, 1] * (gathered[:, :, 0] - maximum).exp()).sum(dim=0)
    log_total = (maximum + exp_sum.log()).tolist()
    chosen = gathered[:, :, 2].amax(dim=0).tolist()
    for index, row in enumerate(wanted):
        shards = gathered[:, index, 3:].reshape(group.size, 2, most)
        answers[row] = PositionLogprobs(
            TokenLogprob(chosen_ids[index], chosen[index] - log_total[index]),
            _best(shards, num_top[row] or 0, log_total[index]),
        )
    return answers


def _best(shards: Tensor, num: int, log_total: float) -> tuple[TokenLogprob, ...]:
    """The num likeliest tokens of one row. shards: [size, (values, ids), most] in id order."""
    # A stable sort keeps the lowest id first among equals.
    values, order = shards[:, 0].flatten().sort(descending=True, stable=True)
    ids = shards[:, 1].flatten()[order]
    return tuple(
        TokenLogprob(int(token_id), value - log_total)
        for value, token_id in zip(values[:num].tolist(), ids[:num].tolist(), strict=True)
        if value > -math.inf
    )


def _look(logits: Tensor, token_ids: list[int], vocab_start: int, most: int) -> _ShardRows:
    num_rows, num_columns = logits.shape
    empty = torch.full((num_rows,), -torch.inf, dtype=torch.float64, device=logits.device)
    values = empty[:, None].repeat(1, most)
    found = _ShardRows(empty.clone(), torch.zeros_like(empty), empty, values, values.clone())
    if num_columns == 0:
        return found
    maxima = block_maxima(logits)
    maximum = maxima.amax(dim=1, keepdim=True)
    # A shard of -inf only must not give NaN: it holds nothing.
    shift = torch.where(maximum.isfinite(), maximum, 0.0)
    found.maximum.copy_(maximum.squeeze(1))
    found.exp_sum.copy_((logits - shift).exp_().sum(dim=1, dtype=torch.float64))
    for row, token_id in enumerate(token_ids):
        if 0 <= (column := token_id - vocab_start) < num_columns:
            found.chosen[row] = logits[row, column]
    if most > 0:
        _fill_top(logits, maxima, vocab_start, found)
    return found


def _fill_top(logits: Tensor, maxima: Tensor, vocab_start: int, found: _ShardRows) -> None:
    num_rows, most = found.values.shape
    bound = kth_largest_bound(maxima, torch.full((num_rows,), most, device=logits.device))
    likely = at_least(logits, bound)
    counts = torch.bincount(likely.rows, minlength=num_rows).tolist()
    values, columns = torch.split(likely.values, counts), torch.split(likely.columns, counts)
    for row in range(num_rows):
        best, order = values[row].sort(descending=True, stable=True)
        num = min(most, len(best))
        found.values[row, :num] = best[:num]
        found.ids[row, :num] = columns[row][order[:num]] + vocab_start
