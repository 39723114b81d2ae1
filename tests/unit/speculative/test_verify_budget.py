"""The window is as wide as pays, decided once and, where it matters, causally."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from kvbraid.speculative.verify_budget import (
    WidthRule,
    best_width,
    causal_width,
    expected_tokens,
    request_gains,
    within,
)

FloatArray = NDArray[np.float64]
DRAFTS = 4
ACCEPTANCE = arrays(
    np.float64, st.tuples(st.integers(1, 5), st.just(DRAFTS)), elements=st.floats(0, 1)
)
SECONDS = arrays(np.float64, DRAFTS + 1, elements=st.floats(0.1, 10)).map(np.sort)


def tokens_by_hand(acceptance: FloatArray, width: int) -> float:
    total = 0.0
    for sequence in acceptance:
        reach = 1.0
        total += 1.0
        for chance in sequence[: width - 1]:
            reach *= chance
            total += reach
    return total


@given(ACCEPTANCE, SECONDS)
def test_best_width_has_the_highest_rate(acceptance: FloatArray, seconds: FloatArray) -> None:
    width = best_width(acceptance, acceptance, seconds)
    rates = [tokens_by_hand(acceptance, w) / seconds[w - 1] for w in range(1, DRAFTS + 2)]
    assert rates[width - 1] == pytest.approx(max(rates), rel=1e-12)
    assert expected_tokens(acceptance)[width - 1] == pytest.approx(
        tokens_by_hand(acceptance, width)
    )


@given(ACCEPTANCE, ACCEPTANCE, SECONDS, st.data())
def test_causal_width_does_not_look_behind_the_slot_it_decides_on(
    acceptance: FloatArray, other: FloatArray, seconds: FloatArray, data: st.DataObject
) -> None:
    expected = np.full_like(acceptance, data.draw(st.floats(0, 1)))
    width = causal_width(acceptance, expected, seconds)
    changed = acceptance.copy()
    rows = np.resize(other, acceptance.shape)
    # Slot `width` was refused: neither its draft nor anything later can have mattered.
    changed[:, width:] = rows[:, width:]
    assert causal_width(changed, expected, seconds) == width


def test_control_best_width_does_look_behind() -> None:
    seconds = np.array([1.0, 1.9, 2.0])
    unlikely, likely = np.array([[0.7, 0.1]]), np.array([[0.7, 0.9]])
    assert best_width(unlikely, unlikely, seconds) == 1
    assert best_width(likely, likely, seconds) == 3
    expected = np.array([[0.7, 0.6]])
    # The causal rule takes the first draft in both cases, in the hope for the second.
    assert causal_width(unlikely, expected, seconds) == 2
    assert causal_width(likely, expected, seconds) == 3


@given(ACCEPTANCE, SECONDS)
def test_causal_width_finds_the_best_width_when_things_turn_out_as_expected(
    acceptance: FloatArray, seconds: FloatArray
) -> None:
    width = causal_width(acceptance, acceptance, seconds)
    rates = expected_tokens(acceptance) / seconds
    assert rates[width - 1] == pytest.approx(rates.max(), rel=1e-9)


@pytest.mark.parametrize("rule", [best_width, causal_width])
def test_rows_of_sequences_with_fewer_drafts_are_padding_that_costs(rule: WidthRule) -> None:
    one = np.array([[0.9, 0.9, 0.9, 0.9]])
    seconds = np.array([1.0, 1.1, 1.2, 1.3, 1.4])
    assert rule(one, one, seconds) == 5
    # Fifteen sequences without drafts: the step costs as much, one sequence gains.
    mixed = np.zeros((16, 4))
    mixed[0] = 0.9
    assert rule(mixed, mixed, seconds) == 1
    # Caps come in as lengths.
    capped = np.where(within(np.array([2]), 4), one, 0.0)
    assert rule(capped, capped, seconds) == 3


@pytest.mark.parametrize("rule", [best_width, causal_width])
def test_no_drafts_and_bad_drafts_decode_plainly(rule: WidthRule) -> None:
    seconds = np.array([1.0, 1.2, 1.3])
    for chance in (0.0, 0.1):
        acceptance = np.full((3, 2), chance)
        assert rule(acceptance, acceptance, seconds) == 1
    assert rule(np.zeros((3, 0)), np.zeros((3, 0)), np.array([1.0])) == 1


SHARES = arrays(np.float64, DRAFTS, elements=st.floats(0, 1))


def best_rate(
    acceptance: FloatArray, seconds: FloatArray, each: FloatArray, sets: Iterable[tuple[int, ...]]
) -> float:
    """Tokens a second where only the sequences of a set draft, at the best width and set."""
    rates = [0.0]
    for drafting in sets:
        alone = np.zeros_like(acceptance)
        alone[list(drafting)] = acceptance[list(drafting)]
        num_others = len(acceptance) - len(drafting)
        rates += (
            tokens_by_hand(alone, w) / (seconds[w - 1] - num_others * each[w - 1])
            for w in range(2, DRAFTS + 2)
        )
    return max(rates)


@given(ACCEPTANCE, SECONDS, SHARES)
def test_the_sequences_that_pay_are_the_best_set(
    acceptance: FloatArray, seconds: FloatArray, shares: FloatArray
) -> None:
    """Of all sets there are."""
    size = len(acceptance)
    # Drafting for all takes what a step is longer than a plain one, at most.
    each = np.concatenate(([0.0], shares * (seconds[1:] - seconds[0]) / size))
    gains = request_gains(acceptance, seconds, each)
    sets = [c for k in range(1, size + 1) for c in combinations(range(size), k)]
    best, plain = best_rate(acceptance, seconds, each, sets), size / seconds[0]
    assume(abs(best / plain - 1) > 1e-6)
    if best < plain:
        assert gains == pytest.approx(best / plain)
        return
    # A sequence that makes no difference may be in or out.
    for least in (1 + 1e-9, 1 - 1e-9):
        found = tuple(np.flatnonzero(gains >= least).tolist())
        assert best_rate(acceptance, seconds, each, [found]) == pytest.approx(best)


@given(ACCEPTANCE.filter(lambda found: len(found) == 1), SECONDS)
def test_a_single_sequence_pays_where_its_step_does(
    acceptance: FloatArray, seconds: FloatArray
) -> None:
    (gain,) = request_gains(acceptance, seconds, np.zeros(DRAFTS + 1))
    rates = [tokens_by_hand(acceptance, w) / seconds[w - 1] for w in range(1, DRAFTS + 2)]
    assert (gain > 1) == (max(rates[1:]) > rates[0])


def test_beside_others_a_sequence_need_not_earn_what_they_share() -> None:
    """A window costs two plain steps, drafting for one sequence more a twentieth of one."""
    seconds, each = np.array([1.0, 2.0, 2.1, 2.2]), np.array([0.0, 0.05, 0.05, 0.05])
    good, poor, bad = np.full(3, 0.95), np.array([0.6, 0.5, 0.5]), np.full(3, 0.01)
    gains = request_gains(np.array([good, good, good, poor, bad]), seconds, each)
    assert (gains > 1).tolist() == [True, True, True, True, False]
    assert request_gains(poor[None], seconds, each)[0] < 1


def test_bug_32_a_saturated_batch_is_not_drafted_for() -> None:
    """DeepSeek-V4-Flash on ROCm, 256 sequences: fixed length 7 lost 12% (spec.md 4.4)."""
    plain = 256 / 8879
    acceptance = np.full((256, 7), 0.72)
    tokens = expected_tokens(acceptance)
    # What the fixed length measured, and a step that grows with its rows up to there.
    at_eight = tokens[7] / 7852
    seconds = plain + (at_eight - plain) * np.arange(8) / 7
    rates = tokens / seconds
    assert rates[7] < rates[0]
    for rule in (best_width, causal_width):
        width = rule(acceptance, acceptance, seconds)
        assert width < 8
        assert rates[width - 1] >= rates[0]


def test_bug_34_one_bit_of_a_confidence_can_change_the_width_so_one_rank_decides() -> None:
    """Two ranks that decided for themselves would run steps of different shapes and hang."""
    seconds = np.array([1.0, 1.5])
    tie = np.nextafter(np.array([[0.5]]), 1.0)
    above = np.nextafter(tie, 1.0)
    for rule in (best_width, causal_width):
        assert rule(tie, tie, seconds) == 1
        assert rule(above, above, seconds) == 2
        # What travels is one plain integer.
        assert type(rule(above, above, seconds)) is int
