"""The switch of speculation: its account, its probes, its reasons."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbraid.speculative.break_even import (
    ALLOWANCE,
    INITIAL_CREDIT,
    BreakEven,
    PlainReason,
    RequestGates,
    Verdict,
)


def test_it_is_on_as_long_as_drafting_is_expected_to_pay_and_does() -> None:
    switch = BreakEven()
    for _ in range(500):
        assert switch.decide(1.5, None, 1) is Verdict.DRAFT
        switch.record(3, 1, cost=2.0)
    assert (switch.reason, switch.num_stops, switch.num_probes) == (None, 0, 0)


def test_it_stops_when_plain_decoding_is_expected_to_be_as_fast() -> None:
    switch = BreakEven()
    assert switch.decide(1.0, None, 1) is Verdict.PLAIN
    assert switch.reason is PlainReason.BELOW_BREAK_EVEN
    # Another batch size may change what is expected; noise of the estimate does not.
    assert switch.decide(1.04, None, 1) is Verdict.PLAIN
    assert switch.decide(1.10, None, 1) is Verdict.DRAFT
    assert switch.reason is None


def test_it_stops_when_what_was_expected_to_pay_has_not() -> None:
    switch = BreakEven()
    lost = 0.0
    while switch.decide(1.5, 0.5, 1) is Verdict.DRAFT:
        switch.record(1, 1, cost=1.5)
        lost += 0.5
        assert lost < 10
    assert switch.reason is PlainReason.OVERSPENT
    assert lost <= INITIAL_CREDIT + 0.5 + ALLOWANCE * 20
    # However good it looks on paper, it now has to earn a probe first.
    assert switch.decide(3.0, 0.5, 1) is Verdict.PLAIN
    assert not switch.can_afford(0.0)


def probe_steps(switch: BreakEven, gain: float, num_steps: int) -> list[int]:
    """Steps at which probes ran against a drafter of which nothing is accepted."""
    probes = []
    for step in range(num_steps):
        if switch.decide(gain, 0.5, 1) is Verdict.PROBE:
            probes.append(step)
            switch.record(1, 1, cost=1.5)
        else:
            switch.record(1, 1, cost=1.0)
    return probes


def test_probes_are_spaced_exponentially_and_short_when_nothing_is_accepted() -> None:
    switch = BreakEven()
    probes = probe_steps(switch, 0.9, 2000)
    starts = [step for step in probes if step - 1 not in probes]
    gaps = np.diff(starts)
    assert len(starts) == switch.num_probes >= 5
    assert all(1.5 < b / a < 2.5 or b >= 512 for a, b in itertools.pairwise(gaps))
    assert gaps.max() < 530
    # Two windows each: the first ones have shown it.
    assert len(probes) <= 2 * len(starts)
    assert switch.num_stops == 1 + len(starts)


def test_a_probe_that_shows_a_gain_resumes() -> None:
    switch = BreakEven()
    gain, probes, resumed = 0.5, 0, 0
    for _ in range(60):
        verdict = switch.decide(gain, 0.5, 1)
        if verdict is Verdict.PROBE:
            probes += 1
            gain = 0.5 + 0.1 * probes
            switch.record(4, 1, cost=1.5)
        elif verdict is Verdict.DRAFT:
            resumed += 1
            switch.record(4, 1, cost=1.5)
        else:
            switch.record(1, 1, cost=1.0)
    assert (switch.num_probes, probes, switch.reason) == (1, 8, None)
    assert resumed > 10


def test_a_probe_that_cannot_show_a_gain_is_never_run() -> None:
    switch = BreakEven()
    for _ in range(5000):
        assert switch.decide(0.9, None, 64) is Verdict.PLAIN
        switch.record(64, 64, cost=1.0)


def test_probes_of_large_batches_are_two_steps() -> None:
    switch = BreakEven()
    verdicts = []
    for _ in range(40):
        verdicts.append(switch.decide(0.9, 0.1, 64))
        switch.record(64 * 3, 64, cost=1.1)
    assert verdicts.count(Verdict.PROBE) == 2


def test_a_probe_waits_until_its_prompts_are_covered_and_a_lost_one_pays_for_them() -> None:
    switch = BreakEven()
    assert switch.decide(0.9, 0.5, 8, entry_price=12.0) is Verdict.PLAIN
    num_steps = switch.steps_to_probe(0.5, 12.0)
    assert num_steps == pytest.approx((2 * 0.5 + 12.0 - INITIAL_CREDIT) / ALLOWANCE, abs=1)
    switch.skip(num_steps)
    credit = switch.credit
    assert switch.decide(0.9, 0.5, 4, entry_price=12.0) is Verdict.PROBE
    switch.record(4, 4, cost=1.5, entry=12.0)
    assert switch.decide(0.9, 0.5, 4, entry_price=12.0) is Verdict.PROBE, "windows are judged alone"
    switch.record(4, 4, cost=1.5)
    assert switch.decide(0.9, 0.5, 4, entry_price=12.0) is Verdict.PLAIN
    assert credit - switch.credit == pytest.approx(13.0, abs=0.1)


def test_prompts_are_paid_for_by_what_they_make_possible() -> None:
    switch = BreakEven()
    for step in range(100):
        assert switch.decide(1.5, None, 8) is Verdict.DRAFT
        switch.record(8 * 3, 8, cost=2.0, entry=10.0 if step == 0 else 0.0)
    assert switch.num_stops == 0


def test_prompts_that_are_never_earned_stop_drafting() -> None:
    switch = BreakEven()
    lost = 0.0
    for _ in range(100):
        if switch.decide(1.5, None, 8) is Verdict.DRAFT:
            switch.record(8 * 3, 8, cost=2.9, entry=5.0)
            lost += 4.9
    assert switch.reason is PlainReason.OVERSPENT
    assert lost < 100


def test_an_entry_that_no_balance_covers_is_paid_once_all_is_saved() -> None:
    switch = BreakEven()
    switch.decide(0.9, 0.5, 8, entry_price=1000.0)
    switch.skip(100_000)
    assert switch.decide(0.9, 0.5, 8, entry_price=1000.0) is Verdict.PROBE


def test_skipping_counts_as_deciding_and_running_plain_steps() -> None:
    asked, skipping = BreakEven(), BreakEven()
    for switch in (asked, skipping):
        switch.decide(0.9, 0.5, 1)
        switch.record(1, 1, cost=1.0)
    for _ in range(100):
        asked.decide(0.9, None, 1)
        asked.record(1, 1, cost=1.0)
    skipping.skip(60)
    skipping.skip(40)
    assert asked.credit == pytest.approx(skipping.credit)
    assert asked.decide(0.9, 0.5, 1) is skipping.decide(0.9, 0.5, 1) is Verdict.PROBE


STEP = st.tuples(
    st.integers(1, 8), st.floats(0.5, 6.0), st.floats(0.3, 3.0), st.booleans(), st.floats(0.0, 2.0)
)


@given(st.lists(STEP, min_size=1, max_size=300))
def test_losses_are_bounded_whatever_happens(
    steps: list[tuple[int, float, float, bool, float]],
) -> None:
    """Estimates, prices and outcomes of any kind: the account alone bounds what is lost."""
    switch = BreakEven()
    served = spent = worst = 0.0
    for emitted, cost, gain, can_probe, price in steps:
        drafted = switch.decide(gain, price if can_probe else None, 1) is not Verdict.PLAIN
        switch.record(emitted if drafted else 1, 1, cost if drafted else 1.0)
        served += emitted if drafted else 1
        spent += cost if drafted else 1.0
        if drafted:
            worst = max(worst, cost)
        # A probe may be one third dearer than its price allows for, times two steps.
        assert spent - served <= INITIAL_CREDIT + ALLOWANCE * served + 4 * worst


# -- requests ----------------------------------------------------------------------------------


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers)


def test_a_request_below_break_even_leaves_and_the_others_stay() -> None:
    gates = RequestGates()
    for slot in (0, 3, 40):
        gates.open(slot)
    pays = gates.judge(slots(0, 3, 40), np.array([1.5, 0.8, 1.01]))
    assert pays.tolist() == [True, False, True]
    assert gates.num_stops == 1
    # Back only by a margin.
    assert gates.judge(slots(3), np.array([1.04])).tolist() == [False]
    assert gates.judge(slots(3), np.array([1.06])).tolist() == [True]
    assert gates.num_stops == 1


def test_a_request_that_is_out_joins_again_at_growing_distances() -> None:
    gates = RequestGates()
    gates.open(0)
    took_part, began = [], []
    for step in range(600):
        gates.judge(slots(0), np.array([0.5]))
        takes_part, begins = gates.join(slots(0))
        if takes_part[0]:
            took_part.append(step)
        if begins[0]:
            began.append(step)
    # Its first windows are granted, so that a newcomer is judged by its own.
    assert took_part[:4] == [0, 1, 2, 3]
    gaps = np.diff(began)
    assert len(began) >= 4
    assert (gaps[1:] >= np.minimum(1.8 * gaps[:-1], 250)).all()
    assert len(took_part) == 4 * (1 + len(began))
    assert gates.num_probes == len(began)


def test_a_slot_starts_afresh_for_the_next_request() -> None:
    gates = RequestGates()
    gates.open(1)
    gates.judge(slots(1), np.array([0.1]))
    gates.open(1)
    assert gates.judge(slots(1), np.array([1.01])).tolist() == [True]


@pytest.mark.parametrize("gain", [1.0, 0.99])
def test_at_break_even_plain_decoding_wins(gain: float) -> None:
    gates = RequestGates()
    gates.open(0)
    assert gates.judge(slots(0), np.array([gain])).tolist() == [False]
