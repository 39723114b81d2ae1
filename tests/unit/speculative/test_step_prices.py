"""What a policy takes for the price of a plain step, and where it looks at it again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbraid.speculative.break_even import PlainReason
from kvbraid.speculative.draft_plan import STEPS_BEFORE_PROBE
from kvbraid.speculative.step_prices import StepPrices
from tests.unit.speculative.measured_policy import measured_policy, outcome


def test_steps_with_prompt_rows_teach_acceptance_but_no_price() -> None:
    policy, slots = measured_policy()
    credit, before = policy.break_even.credit, policy.costs.step.num_observed(1, 4)
    policy.record(outcome(slots, step_seconds=50.0, has_prompt_rows=True))
    assert policy.break_even.credit == credit
    assert policy.costs.step.num_observed(1, 4) == before
    assert policy.rates.shared[0] < 0.75


@pytest.mark.parametrize("num_asked", [3, 0], ids=["none verified", "rows late"])
def test_a_step_that_wanted_drafts_and_had_none_is_no_plain_one(num_asked: int) -> None:
    """It would refresh a plain step's price with its own."""
    policy, slots = measured_policy()
    undrafted = outcome(slots, width=1, num_verified=[0], num_asked=num_asked, step_seconds=1.3)
    num_refreshed = 0
    for step in range(2000):
        plan = policy.plan(slots, [3])
        if plan.reason is PlainReason.MEASURING:
            num_refreshed += 1
            policy.skip(3, {1: [1.0, 1.0, 1.0]})
        elif step % 10:
            policy.record(outcome(slots, num_accepted=[3]))
        else:
            policy.record(undrafted)
    assert num_refreshed >= 6
    assert policy.costs.plain_seconds(1) == 1.0


def test_what_a_plain_step_costs_is_what_it_costs_without_a_plan() -> None:
    """A planned step has its books to keep: were that the price, drafting would be measured
    against it, and pay by a tenth more than it does."""
    policy, slots = measured_policy()
    plain = outcome(slots, width=1, num_verified=[0], num_asked=0, num_drafting=0)
    for _ in range(100):
        policy.observe_acceptance(outcome(slots))
    assert policy.plan(slots, [3]).reason is PlainReason.BELOW_BREAK_EVEN
    for _ in range(20):
        policy.record(replace(plain, draft_seconds=0.0, step_seconds=1.3))
    assert policy.costs.plain_seconds(1) == 1.0
    for _ in range(8):
        policy.skip(4, {1: [0.8, 0.8, 9.0, 0.8]})
    assert policy.costs.plain_seconds(1) == 0.8


def test_a_pause_of_the_machine_is_not_held_against_drafting() -> None:
    policy, slots = measured_policy()
    policy.record(outcome(slots, step_seconds=500.0, draft_seconds=90.0))
    paused = policy.break_even.credit
    policy, slots = measured_policy()
    policy.record(outcome(slots))
    assert policy.break_even.credit - paused < 1.0


def test_transfers_beside_a_drafted_step_are_not_held_against_it() -> None:
    """Usual prices are: of drafting, of a first one, and of the step."""
    policy, slots = measured_policy()
    for _ in range(3):
        policy.costs.first_draft.observe(1, 1, 0.9)
    usual = outcome(slots)
    policy.record(usual)
    charged = policy.break_even.credit
    longer = replace(
        usual, step_seconds=1.4 * usual.step_seconds, draft_seconds=3.0 * usual.draft_seconds
    )
    for step, told_prompts in ((longer, False), (replace(longer, draft_seconds=3.0), True)):
        policy, slots = measured_policy()
        for _ in range(3):
            policy.costs.first_draft.observe(1, 1, 0.9)
        policy.record(replace(step, told_prompts=told_prompts, has_transfers=True))
        assert policy.break_even.credit <= charged
        assert charged - policy.break_even.credit < 0.1
    policy, slots = measured_policy()
    policy.record(longer)
    assert charged - policy.break_even.credit > 0.5


def test_the_plain_price_is_refreshed_now_and_then() -> None:
    policy, slots = measured_policy()
    reasons = []
    for _ in range(600):
        plan = policy.plan(slots, [3])
        reasons.append(plan.reason)
        if plan.reason is None:
            policy.record(outcome(slots, num_accepted=[3]))
        else:
            plain = outcome(slots, width=1, num_verified=[0], num_asked=0, step_seconds=1.0)
            policy.record(replace(plain, reason=plan.reason))
    assert set(reasons) == {None, PlainReason.MEASURING}
    assert reasons.count(PlainReason.MEASURING) == 2


def test_rows_are_kept_from_a_probes_distance_on() -> None:
    """Whatever is skipped, a plan falls where it is near enough."""
    policy, slots = measured_policy()
    for _ in range(200):
        policy.record(outcome(slots))
    distances = []
    for _ in range(400):
        plan = policy.plan(slots, [3])
        if plan.reason is None:
            break
        distances.append(policy.steps_to_drafts(1))
        policy.skip(plan.num_same + 1, {})
    assert distances[0] > STEPS_BEFORE_PROBE, "the first one is far"
    near = next(distance for distance in distances if distance <= STEPS_BEFORE_PROBE)
    assert near >= STEPS_BEFORE_PROBE - 16


def test_a_first_drafting_is_charged_in_full_and_teaches_nothing_of_later_ones() -> None:
    policy, slots = measured_policy()
    prices = StepPrices(3, drafts_in_blocks=False)
    prices.costs = policy.costs
    first = outcome(slots, draft_seconds=9.0, told_prompts=True)
    assert prices.cost(first) == pytest.approx((1.03 + 0.15, 9.0 - 0.15))
    for _ in range(9):
        prices.observe(first)
    assert prices.cost(outcome(slots)) == pytest.approx((1.03 + 0.15, 0.0))
    assert prices.first_draft_price(1) == pytest.approx(9.0)


def test_a_probe_waits_until_the_prompts_that_it_tells_are_paid_for() -> None:
    policy, slots = measured_policy()
    for _ in range(100):
        policy.observe_acceptance(outcome(slots))
    policy.plan(slots, [3])
    assert not policy.is_drafting
    soon = policy.steps_to_drafts(1)
    for _ in range(3):
        policy.observe_seconds(outcome(slots, draft_seconds=10.0, told_prompts=True))
    policy.plan(slots, [3])
    assert soon < 100 < policy.steps_to_drafts(1)


def test_a_pause_of_the_machine_is_not_held_against_a_first_drafting_once_there_were_some() -> None:
    policy, slots = measured_policy()
    prices = StepPrices(3, drafts_in_blocks=False)
    prices.costs = policy.costs
    for _ in range(3):
        prices.observe(outcome(slots, draft_seconds=1.0, told_prompts=True))
    cost = prices.cost(outcome(slots, draft_seconds=90.0, told_prompts=True))
    assert cost is not None
    assert cost.entry < 4.0
