"""Chances of acceptance: learned, conditional on being reached, bounded, forgetting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbraid.speculative.calibration import AcceptanceRates, ConfidenceCalibration, Reached

DRAFTS = 4


def reached(verified: list[int], accepted: list[int]) -> Reached:
    return Reached(np.array(verified), np.array(accepted), DRAFTS)


def test_a_slot_teaches_only_when_it_was_reached() -> None:
    said = reached([4, 4, 2, 3, 0], [4, 1, 2, 0, 0])
    assert said.was_tested.astype(int).tolist() == [
        [1, 1, 1, 1],
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [1, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    assert said.was_accepted.astype(int).tolist() == [
        [1, 1, 1, 1],
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
    ]


def play(
    rates: AcceptanceRates, slots: list[int], chance: list[float], windows: int, seed: int = 0
) -> None:
    draws = np.random.default_rng(seed)
    for _ in range(windows):
        agrees = draws.random((len(slots), DRAFTS)) < np.array(chance)
        accepted = np.cumprod(agrees, axis=1).sum(axis=1)
        rates.observe(np.array(slots), reached([DRAFTS] * len(slots), accepted.tolist()))


def test_shared_rates_are_learned_by_position() -> None:
    rates = AcceptanceRates(DRAFTS)
    play(rates, [rates.open() for _ in range(16)], [0.9, 0.7, 0.8, 0.5], windows=200)
    assert rates.shared == pytest.approx([0.9, 0.7, 0.8, 0.5], abs=0.09)
    newcomer = rates.open()
    assert rates.rates(np.array([newcomer]))[0] == pytest.approx(rates.shared)


def test_a_sequence_soon_outweighs_what_is_shared() -> None:
    rates = AcceptanceRates(DRAFTS)
    good = [rates.open() for _ in range(8)]
    play(rates, good, [0.9] * DRAFTS, windows=100)
    bad = rates.open()
    estimates = []
    for _ in range(12):
        rates.observe(np.array([bad]), reached([DRAFTS], [0]))
        estimates.append(float(rates.rates(np.array([bad]))[0, 0]))
    assert estimates == sorted(estimates, reverse=True)
    assert estimates[3] < 0.5
    assert estimates[-1] < 0.3
    assert float(rates.rates(np.array(good))[:, 0].min()) > 0.7


@pytest.mark.parametrize(("before", "after"), [(0.95, 0.1), (0.1, 0.95)])
def test_rates_follow_a_change(before: float, after: float) -> None:
    rates = AcceptanceRates(DRAFTS)
    slot = rates.open()
    play(rates, [slot], [before] * DRAFTS, windows=1000)
    play(rates, [slot], [after] * DRAFTS, windows=80, seed=1)
    assert rates.rates(np.array([slot]))[0, 0] == pytest.approx(after, abs=0.25)


def test_after_forgetting_a_few_windows_decide() -> None:
    rates = AcceptanceRates(DRAFTS)
    slot = rates.open()
    play(rates, [slot], [0.0] * DRAFTS, windows=1000)
    assert rates.rates(np.array([slot]))[0, 0] < 0.05
    rates.forget_shared()
    rates.forget(np.array([slot]))
    for _ in range(8):
        rates.observe(np.array([slot]), reached([DRAFTS], [DRAFTS]))
    assert rates.rates(np.array([slot]))[0, 0] > 0.7


def test_slots_are_reused_without_their_past_and_memory_stays() -> None:
    rates = AcceptanceRates(DRAFTS)
    slots = set()
    for _ in range(300):
        slot = rates.open()
        slots.add(slot)
        assert rates.rates(np.array([slot]))[0] == pytest.approx(rates.shared)
        rates.observe(np.array([slot]), reached([DRAFTS], [0]))
        rates.close(slot)
    assert len(slots) == 1
    held = [rates.open() for _ in range(50)]
    assert len(set(held)) == 50
    rates.close(held[0])
    with pytest.raises(ValueError, match="not open"):
        rates.close(held[0])
    with pytest.raises(ValueError, match="slot 999"):
        rates.close(999)


@given(st.lists(st.tuples(st.integers(0, DRAFTS), st.integers(0, DRAFTS)), max_size=60))
def test_rates_are_chances_whatever_happens(windows: list[tuple[int, int]]) -> None:
    rates = AcceptanceRates(DRAFTS)
    slot = rates.open()
    for verified, accepted in windows:
        rates.observe(np.array([slot]), reached([verified], [min(verified, accepted)]))
    for values in (rates.rates(np.array([slot])), rates.shared):
        assert ((values > 0) & (values < 1)).all()


# -- confidences -------------------------------------------------------------------------------


def teach(calibration: ConfidenceCalibration, truth: float, windows: int, seed: int = 0) -> None:
    """A head that says c where the chance is c ** truth."""
    draws = np.random.default_rng(seed)
    for _ in range(windows):
        confidences = draws.random((32, DRAFTS))
        agrees = draws.random((32, DRAFTS)) < confidences**truth
        accepted = np.cumprod(agrees, axis=1).sum(axis=1)
        calibration.observe(confidences, reached([DRAFTS] * 32, accepted.tolist()))


def row(value: float) -> np.ndarray:
    return np.full((1, DRAFTS), value)


def test_confidences_are_taken_at_their_word_at_first() -> None:
    calibration = ConfidenceCalibration(DRAFTS)
    for value in (0.05, 0.3, 0.5, 0.77, 0.95):
        assert calibration.chances(row(value)) == pytest.approx(row(value), abs=1e-9)


@pytest.mark.parametrize("truth", [2.5, 0.4])
def test_an_overconfident_or_timid_head_is_corrected(truth: float) -> None:
    calibration = ConfidenceCalibration(DRAFTS)
    teach(calibration, truth, windows=400)
    for value in (0.2, 0.4, 0.6, 0.8):
        chances = calibration.chances(row(value))[0]
        assert chances[:2] == pytest.approx([value**truth] * 2, abs=0.1)
        assert abs(chances[0] - value**truth) < abs(value - value**truth)


@given(st.integers(0, 5), st.floats(0.2, 4.0))
def test_chances_grow_with_the_confidence(windows: int, truth: float) -> None:
    calibration = ConfidenceCalibration(DRAFTS)
    teach(calibration, truth, windows)
    grid = np.linspace(0.0, 1.0, 101)[:, None].repeat(DRAFTS, axis=1)
    chances = calibration.chances(grid)
    assert (np.diff(chances, axis=0) >= -1e-12).all()
    assert ((chances > 0) & (chances < 1)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -3.0, 7.0, 1e300])
def test_confidences_that_are_none_do_no_harm(value: float) -> None:
    calibration = ConfidenceCalibration(DRAFTS)
    chances = calibration.chances(row(value))
    assert ((chances > 0) & (chances < 1)).all()
    assert np.isnan(value) <= bool((chances < 0.1).all())
    calibration.observe(row(value), reached([DRAFTS], [1]))
    teach(calibration, 1.0, windows=2)
    assert np.isfinite(calibration.chances(row(0.5))).all()
