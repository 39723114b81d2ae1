"""Token-wise rejection sampling: the second way to verify, where the drafts' law q is known.

A draft x drawn from q is accepted with probability min(1, p(x) / q(x)); the first that is not is
replaced by a draw from norm(max(p - q, 0)); if all are, one more token is drawn from the last row
of p. The emitted tokens follow p exactly if q is exactly the law that x was drawn from (same
temperature, same filters), and if nothing that was decided depends on noise that is used again:

- accept, residual and draft have streams of their own, one number a position, and a position's
  accept and residual numbers are used once, because the test at a position settles its token;
- a draft's noise is used again when its position is drafted again after a rejection, while its
  confidence may already have moved a budget. So sampled drafts draw from `draft_key`, which is
  another one for each window. The sampler's own noise is for exact match only;
- where the window is cut may depend on drafts and confidences before the cut, not on the draft
  that is cut off or on later ones: `verify_budget.causal_width`.

A greedy drafter has q = 1 at its draft. Then p(x) is the chance to accept and the residual is p
without x, which is the same law as drawing y from p and accepting x when x = y.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvbraid.sampling_key import mix64

_GOLDEN = 0x9E3779B97F4A7C15
_PURPOSE_ACCEPT = 0xA5C3_0001
_PURPOSE_RESIDUAL = 0xA5C3_0002
_PURPOSE_DRAFT = 0xA5C3_0003
# Below this what is left of p - q is rounding: p and q are the same law.
_MIN_RESIDUAL_MASS = 1e-8
# Row sums of float32 softmaxes over some 10^5 tokens are off by much less.
_MAX_SUM_ERROR = 1e-3


class Chance(Protocol):
    """Where the ratio test takes its random decisions from."""

    def accepts(self, position: int, probability: float) -> bool:
        """True with this probability, for the draft at this position."""
        ...

    def draws(self, position: int, weights: Tensor) -> int:
        """Index i with chance weights[i] / sum; float64 [V], >= 0, not all 0."""
        ...


class KeyedChance:
    """Decisions as a pure function of (key, position, purpose).

    key: the sequence's 64-bit sampling key, signed or not.
    """

    def __init__(self, key: int) -> None:
        self._key = key

    def accepts(self, position: int, probability: float) -> bool:
        return uniform(self._key, position, _PURPOSE_ACCEPT) < probability

    def draws(self, position: int, weights: Tensor) -> int:
        cumulative = weights.cumsum(0)
        wanted = uniform(self._key, position, _PURPOSE_RESIDUAL) * cumulative[-1]
        # right=True and the bound: an index of weight 0 is never drawn, neither the first nor, by
        # rounding, the last.
        index = int(torch.searchsorted(cumulative, wanted, right=True))
        return min(index, int(weights.nonzero()[-1]))


def uniform(key: int, position: int, purpose: int) -> float:
    """A number in (0, 1) with 53 bits, never 0 or 1; independent for distinct arguments."""
    stream = mix64(key ^ mix64(purpose * _GOLDEN))
    word = mix64(stream ^ mix64((position + 1) * _GOLDEN))
    return min(((word >> 11) + 0.5) * 2.0**-53, 1.0 - 2.0**-53)


def draft_key(key: int, window_start: int) -> int:
    """The 64-bit key that a sampled drafter draws this window's drafts with.

    window_start: position of the anchor, which grows from window to window.
    """
    return mix64(mix64(key ^ mix64(_PURPOSE_DRAFT * _GOLDEN)) + (window_start + 1) * _GOLDEN)


def verify_by_ratio(
    drafts: Sequence[int],
    target: Tensor,
    draft: Tensor | None,
    *,
    first_position: int,
    chance: Chance,
) -> list[int]:
    """The emitted tokens of one window: the accepted drafts and one more.

    drafts: k token ids, the first for first_position. target: [k + 1, V] float32 or float64, the
    fully processed law p of each row (bias, penalties, temperature and filters applied). draft:
    [k, V], the law q that each draft was drawn from, zero outside a smaller draft vocabulary;
    None for a greedy drafter. A draft that q cannot have drawn (no token id, q = 0) is none: its
    row draws from p.
    Raises ValueError when shapes do not fit or a row is no probability law.
    """
    vocab_size = target.shape[-1]
    _check_laws("target", target, (len(drafts) + 1, vocab_size))
    if draft is not None:
        _check_laws("draft", draft, (len(drafts), vocab_size))
    for slot, token_id in enumerate(drafts):
        position = first_position + slot
        p = target[slot].double()
        if not 0 <= token_id < vocab_size:
            return [*drafts[:slot], chance.draws(position, p)]
        q = _one_hot(token_id, p) if draft is None else draft[slot].double()
        if q[token_id] <= 0:
            return [*drafts[:slot], chance.draws(position, p)]
        if not chance.accepts(position, acceptance_probability(p, q, token_id)):
            return [*drafts[:slot], chance.draws(position, residual(p, q))]
    return [*drafts, chance.draws(first_position + len(drafts), target[-1].double())]


def acceptance_probability(p: Tensor, q: Tensor, token_id: int) -> float:
    """min(1, p(x) / q(x)); q(x) > 0."""
    return min(1.0, float(p[token_id] / q[token_id]))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0), not normalised; p where nothing but rounding would be left. float64 [V]."""
    left = (p - q).clamp(min=0)
    return left if float(left.sum()) > _MIN_RESIDUAL_MASS else p


def _one_hot(token_id: int, like: Tensor) -> Tensor:
    q = torch.zeros_like(like)
    q[token_id] = 1.0
    return q


def _check_laws(name: str, rows: Tensor, shape: tuple[int, int]) -> None:
    if tuple(rows.shape) != shape or rows.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name} rows {tuple(rows.shape)} {rows.dtype} must be {shape} float32 or float64"
        )
    sums = rows.double().sum(dim=1)
    # Written so that NaN is refused too.
    if not bool((rows >= 0).all() and ((sums - 1.0).abs() <= _MAX_SUM_ERROR).all()):
        raise ValueError(f"{name} rows must be probabilities that add up to 1, got {sums.tolist()}")
