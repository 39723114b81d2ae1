"""The window is as wide as pays, decided once and, where it matters, causally."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from kvbraid.speculative.verify_budget import (
    WidthRule,
    best_gains,
    best_width,
    causal_width,
    expected_tokens,
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


@given(ACCEPTANCE, SECONDS)
def test_gain_of_a_sequence_is_that_of_a_step_of_its_likes(
    acceptance: FloatArray, seconds: FloatArray
) -> None:
    gains = best_gains(acceptance, seconds)
    for sequence, gain in zip(acceptance, gains, strict=True):
        rates = [tokens_by_hand(sequence[None], w) / seconds[w - 1] for w in range(1, DRAFTS + 2)]
        assert gain == pytest.approx(max(rates[1:]) / rates[0])


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
