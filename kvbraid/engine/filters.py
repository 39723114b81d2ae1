"""Top-k, top-p and min-p over a vocabulary that is sharded over the ranks of a group.

Each filter is a threshold on the logit: what is not below it stays, ties with it included. The
threshold is the largest value whose tail (the tokens at or above it) weighs enough, by count for
top-k and by probability mass for top-p. It is found by radix search over heights, logits as
integers in units of 2**-24 nat, with [rows, 256] tail sums added up over the group at each digit;
no row is ever gathered. Weights are integers held in float64, so sums are exact in any order and
the result does not depend on how the vocabulary is cut.

Only tokens near the maximum take part. At most 31 nats: a filtered row drops all tokens below
(3e-14 times as likely as the best). Mostly far fewer: for top-k as many as the k-th largest block
maximum leaves, for top-p 6 nats, or as many as hold the mass for sure when those turn out too few.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attention.interface import Group
from kvbraid.engine.row_scan import (
    Found,
    at_least,
    block_maxima,
    kth_largest_bound,
    row_parts,
    take_rows,
)
from kvbraid.engine.sampling_rows import RowGroup

_DIGIT_BITS = 8
_DIGITS = 1 << _DIGIT_BITS
_UNITS_PER_NAT = 1 << 24
_MAX_DEPTH_NATS = 31
_TOP = _MAX_DEPTH_NATS * _UNITS_PER_NAT  # height of the row's maximum
_USUAL_TOP_P_DEPTH_NATS = 6.0
_MASS_ONE = 2.0**34  # of the most likely token; sums stay below 2**53 for 2**19 tokens


def filter_tokens(scaled: Tensor, params: RowGroup, group: Group) -> Found:
    """The tokens of this shard that survive all filters of their row.

    scaled: float32 [m, V_local], contiguous, logits over temperature; params: the same m rows.
    Filters apply in the order top-k, top-p (of the mass that top-k left), min-p.
    """
    limits = _limits(scaled, params, group)
    found, row_mass = _near_maximum(scaled, params, limits, group)
    height = _height(found.values - limits.maximum[found.rows])
    if params.has_top_k:
        wanted = torch.where(limits.has_top_k, params.top_k.double(), torch.inf)
        counts = torch.ones_like(height, dtype=torch.float64)
        keep = height >= _threshold(height, found.rows, counts, wanted, group)[found.rows]
        found, height = found.keep(keep), height[keep]
    if row_mass is not None:
        mass = _mass(found.values - limits.maximum[found.rows])
        if params.has_top_k:
            left = group.all_reduce(_sums(found.rows, mass, len(row_mass)))
            row_mass = torch.where(limits.has_top_k, left, row_mass)
        wanted = torch.where(params.top_p < 1.0, params.top_p.double() * row_mass, torch.inf)
        keep = height >= _threshold(height, found.rows, mass, wanted, group)[found.rows]
        found, height = found.keep(keep), height[keep]
    return found.keep(height >= _height(params.min_p.log())[found.rows])


class _Limits(NamedTuple):
    """What is known of whole rows, equal on all ranks.

    maximum: float32 [m]. has_top_k: bool [m], top_k is smaller than the vocabulary. floor: float32
    [m], nothing below it can stay. deepest: float32 [m], nothing below it can stay or count.
    """

    maximum: Tensor
    has_top_k: Tensor
    floor: Tensor
    deepest: Tensor


def _limits(scaled: Tensor, params: RowGroup, group: Group) -> _Limits:
    num_rows, num_columns = scaled.shape
    maxima = block_maxima(scaled)
    parts = [maxima.amax(dim=1), scaled.new_full((1,), num_columns)]
    if params.has_top_k:
        parts.append(kth_largest_bound(maxima, params.top_k))
    gathered = group.all_gather(torch.cat(parts))
    maximum = gathered[:, :num_rows].amax(dim=0)
    vocab_size = gathered[:, num_rows].sum()
    has_top_k = params.top_k < vocab_size
    # V tokens log(V / (1 - p)) below the maximum weigh at most 1 - p of it together.
    depth = (torch.log(vocab_size / (1.0 - params.top_p)) + 0.1).clamp(max=_MAX_DEPTH_NATS)
    deepest = maximum - torch.minimum(depth, -params.min_p.log())
    usual = torch.where(params.top_p < 1.0, maximum - _USUAL_TOP_P_DEPTH_NATS, deepest)
    floor = torch.maximum(usual, deepest)
    if params.has_top_k:
        # What min-p will drop still counts for top-k and for top-p after it.
        by_count = gathered[:, num_rows + 1 :].amax(dim=0)
        by_count = torch.maximum(by_count, maximum - _MAX_DEPTH_NATS)
        floor = torch.where(has_top_k, by_count, floor)
        deepest = torch.where(has_top_k, by_count, deepest)
    # A row of NaN, of +inf or without tokens has no candidates: nothing reaches NaN.
    floor = torch.where(maximum.isfinite(), floor, torch.nan)
    return _Limits(maximum, has_top_k, floor, deepest)


def _near_maximum(
    scaled: Tensor, params: RowGroup, limits: _Limits, group: Group
) -> tuple[Found, Tensor | None]:
    """Candidates for all filters; with top-p also the mass of the whole rows, [m] float64, of all
    ranks (of no meaning in rows with top-k)."""
    found = at_least(scaled, limits.floor)
    if not params.has_top_p:
        return found, None
    local = torch.zeros((2, len(limits.floor)), dtype=torch.float64, device=scaled.device)
    mass = _mass(found.values - limits.maximum[found.rows])
    local[0] = _sums(found.rows, mass, len(limits.floor))
    whole = (~limits.has_top_k).nonzero().squeeze(1)
    if len(whole) > 0:
        local[1, whole] = _row_mass(take_rows(scaled, whole), limits.maximum[whole])
    held, row_mass = group.all_reduce(local).unbind(0)
    is_short = (held < params.top_p.double() * row_mass) & (limits.deepest < limits.floor)
    if bool(is_short.any()):
        found = at_least(scaled, torch.where(is_short, limits.deepest, limits.floor))
    return found, row_mass


def _sums(index: Tensor, weights: Tensor, size: int) -> Tensor:
    """Sum of the weights of each index: [size] float64, also when there are none."""
    return torch.bincount(index, weights, minlength=size).double()


def _mass(below_maximum: Tensor) -> Tensor:
    """Probability masses as integers, relative to the row's best token: float64.

    Elementwise, and therefore equal however the row is cut.
    """
    return (below_maximum.exp() * _MASS_ONE).floor_().double()


def _row_mass(scaled: Tensor, maximum: Tensor) -> Tensor:
    """Mass of this shard's part of whole rows: [m] float64."""
    masses = []
    for part in row_parts(scaled):
        mass = (scaled[part] - maximum[part, None]).exp_().mul_(_MASS_ONE).floor_()
        masses.append(mass.sum(dim=1, dtype=torch.float64))
    return torch.cat(masses)


def _height(below_maximum: Tensor) -> Tensor:
    """Integer with the order of the float32 differences to the maximum: int64 in [0, _TOP]."""
    depth = (below_maximum * -_UNITS_PER_NAT).clamp(max=_TOP)
    return _TOP - depth.long()


def _threshold(
    height: Tensor, rows: Tensor, weights: Tensor, wanted: Tensor, group: Group
) -> Tensor:
    """For each row the largest t >= 0 such that the elements with height >= t weigh at least
    `wanted` over all ranks; 0 where even all of them do not.

    height, rows: int64 [K]; weights: float64 [K]; wanted: float64 [m], > 0, equal on all ranks.
    """
    num_rows = len(wanted)
    digits = torch.arange(_DIGITS, device=wanted.device)
    above = torch.zeros_like(wanted)  # weight of what lies above the range of the digit
    low = torch.zeros(num_rows, dtype=torch.int64, device=wanted.device)
    num_bits = _TOP.bit_length()
    while True:
        shift = max(0, num_bits - _DIGIT_BITS)
        digit = (height - low[rows]) >> shift
        sums = _sums(rows * _DIGITS + digit, weights, num_rows * _DIGITS)
        sums = group.all_reduce(sums).view(num_rows, _DIGITS)
        tails = sums.flip(1).cumsum(1).flip(1) + above[:, None]
        chosen = ((tails >= wanted[:, None]) * digits).amax(dim=1)
        low = low + (chosen << shift)
        if shift == 0:
            return low
        above = above + (sums * (digits > chosen[:, None])).sum(dim=1)
        inside = (digit == chosen[rows]).nonzero().squeeze(1)
        height, rows, weights = height[inside], rows[inside], weights[inside]
        num_bits = shift
