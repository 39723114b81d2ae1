"""How wide a step's verify window is: as wide as gives the most tokens a second.

All sequences of a step share one width w = 1 + drafts, since a step is one rectangle of B * w rows;
a sequence with fewer drafts is padded and costs the same. With a_ij the chance that draft j of
sequence i is accepted given that those before were,

    tokens(w) = B + sum_i sum_(j < w) a_i1 * ... * a_ij      rate(w) = tokens(w) / seconds(w)

The width is decided once, by rank 0, and travels with the step plan: two ranks whose confidences
differ in the last bit would otherwise run steps of different shapes.

Two rules. Both look only at what is known before the verify step, so rows that are cut are never
computed. `best_width` takes the best of all widths; verification by exact match emits the target's
samples whatever the rule, so there any rule is lossless. `causal_width` decides on slot j with
confidences of the slots up to j only, which a drafter computes from drafts before j; what comes
later is taken at its expectation. The ratio test needs that one: a cut that has seen the draft
which it cuts off, or later ones, bends the law of what is emitted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

WidthRule = Callable[[FloatArray, FloatArray, FloatArray], int]
"""(acceptance, expected, seconds) -> width, as `best_width` and `causal_width`."""


def best_width(acceptance: FloatArray, expected: FloatArray, seconds: FloatArray) -> int:
    """The width in [1, g + 1] with the highest rate; the smallest of equals.

    acceptance: [B, g], chance that a draft is accepted given that those before were; 0 from the
    first slot without a draft on. expected: not looked at, see `causal_width`.
    seconds: [g + 1], a whole step at width 1, 2, ..., drafting included; > 0.
    """
    return 1 + int(np.argmax(expected_tokens(acceptance) / seconds))


def causal_width(acceptance: FloatArray, expected: FloatArray, seconds: FloatArray) -> int:
    """A width in [1, g + 1], grown slot by slot while some larger width promises a higher rate.

    expected: [B, g], what `acceptance` was expected to be before this window was drafted; 0 only
    where a limit that was known then (remaining tokens, context) allows no draft. How many drafts
    the drafter gave must not show in it: that depends on the drafts.
    """
    num_sequences, max_drafts = acceptance.shape
    reached = np.ones(num_sequences)
    tokens = float(num_sequences)
    for slot in range(max_drafts):
        reached = reached * acceptance[:, slot]
        later = reached[:, None] * np.cumprod(expected[:, slot + 1 :], axis=1)
        gains = np.concatenate(([reached.sum()], later.sum(axis=0)))
        ahead = (tokens + np.cumsum(gains)) / seconds[slot + 1 :]
        if float(ahead.max()) <= tokens / seconds[slot]:
            return slot + 1
        tokens += float(gains[0])
    return 1 + int(max_drafts)


def expected_tokens(acceptance: FloatArray) -> FloatArray:
    """Tokens that a step emits in expectation, all sequences together, by width: [g + 1]."""
    by_slot: FloatArray = np.cumprod(acceptance, axis=1).sum(axis=0)
    tokens: FloatArray = len(acceptance) + np.concatenate((np.zeros(1), np.cumsum(by_slot)))
    return tokens


def request_gains(acceptance: FloatArray, seconds: FloatArray, each: FloatArray) -> FloatArray:
    """For each sequence what drafting for it brings over what it costs, [B]: above 1 it raises the
    step's rate, given that those draft as well which are worth it.

    What sequences share, they need not earn one by one: with drafts for k of B sequences the step
    takes seconds(w) - (B - k) each(w), so that beside others a sequence pays that emits little more
    than without. Where drafts pay for no k, all get the best rate over that of plain decoding.

    seconds: as of `best_width`, with drafts for all. each: [g + 1], what drafting for one sequence
    more takes of it; 0 at width 1.
    """
    num_sequences = len(acceptance)
    extra = np.cumsum(np.cumprod(acceptance, axis=1), axis=1)
    drafting = np.arange(1, num_sequences + 1)[:, None]
    order = np.argsort(-extra, axis=0, kind="stable")
    tokens = num_sequences + np.cumsum(np.take_along_axis(extra, order, axis=0), axis=0)
    taken = seconds[1:] - (num_sequences - drafting) * each[1:]
    rates = tokens / taken
    place = int(np.argmax(rates))
    num_drafting, slot = 1 + place // rates.shape[1], place % rates.shape[1]
    best, plain = float(rates.flat[place]), num_sequences / float(seconds[0])
    if best <= plain:
        return np.full(num_sequences, best / plain)
    own = extra[:, slot]
    is_drafting = np.zeros(num_sequences, dtype=np.bool_)
    is_drafting[order[:num_drafting, slot]] = True
    others_tokens = tokens.flat[place] - np.where(is_drafting, own, 0.0)
    cost = np.full(num_sequences, each[1 + slot])
    others_seconds = taken.flat[place] - np.where(is_drafting, cost, 0.0)
    if num_drafting == 1:
        # Without it the step is a plain one.
        cost[is_drafting] = taken.flat[place] - seconds[0]
        others_seconds[is_drafting] = seconds[0]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        gains: FloatArray = own * others_seconds / (others_tokens * cost)
    # What costs nothing pays.
    return np.where(cost > 0, gains, np.inf)


def within(lengths: NDArray[np.int64], max_drafts: int) -> NDArray[np.bool_]:
    """[B, g]: whether a sequence's slot is among its first `lengths` ones."""
    return np.arange(max_drafts)[None, :] < lengths[:, None]
