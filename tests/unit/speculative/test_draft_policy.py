"""The policy in a simulated worker: never far below plain decoding, and fast where drafts are good.

Times are simulated: `Run.speed` compares with plain decoding of the same tokens, learning
included, without a start-up profile.
"""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbraid.speculative.break_even import INITIAL_CREDIT, PlainReason
from kvbraid.speculative.draft_plan import DraftPlan, StepOutcome
from kvbraid.speculative.draft_policy import DraftPolicy
from kvbraid.speculative.verify_budget import WidthRule, best_width, causal_width
from tests.unit.speculative.measured_policy import measured_policy, outcome
from tests.unit.speculative.simulated_worker import (
    MACHINES,
    MAX_DRAFTS,
    Machine,
    Quality,
    Run,
    Worker,
    always,
    simulate,
)

FLOOR = 0.97


def turncoat(num_emitted: int) -> float:
    """Bad from token 1000 on, good again from 2000 on."""
    return 0.0 if 1000 <= num_emitted < 2000 else 0.85


def mean_speed(
    machine: str, quality: list[Quality], batch: int, num_seeds: int = 2, **options: object
) -> float:
    arguments = {"plain_steps": 500, **options}
    return statistics.mean(
        simulate(MACHINES[machine], quality, batch=batch, seed=seed, **arguments)[0].speed  # type: ignore[arg-type]
        for seed in range(num_seeds)
    )


BATCHES = pytest.mark.parametrize("batch", [1, 8, 64])
EVERY_MACHINE = pytest.mark.parametrize("machine", MACHINES)
KINDS = pytest.mark.parametrize("has_confidences", [False, True], ids=["eagle3", "dspark"])


@BATCHES
@EVERY_MACHINE
@KINDS
def test_an_adversarial_drafter_costs_less_than_three_percent(
    machine: str, batch: int, has_confidences: bool
) -> None:
    speed = mean_speed(machine, [always(0.0)], batch, has_confidences=has_confidences)
    assert FLOOR <= speed < 1.0


@BATCHES
@EVERY_MACHINE
@pytest.mark.parametrize("quality", [[always(0.3)], [always(0.6)], [always(0.85), always(0.0)]])
def test_mediocre_and_mixed_drafters_never_lose_much(
    machine: str, batch: int, quality: list[Quality]
) -> None:
    run, _ = simulate(MACHINES[machine], quality, batch=batch, plain_steps=400, seed=8)
    assert run.speed >= FLOOR


# What the best fixed width would reach is computed below; learning costs a little of it.
@BATCHES
@EVERY_MACHINE
@KINDS
def test_a_good_drafter_is_used_nearly_as_well_as_by_the_best_fixed_width(
    machine: str, batch: int, has_confidences: bool
) -> None:
    chance = 0.85
    costs = MACHINES[machine]
    best = 1.0
    for width in range(2, MAX_DRAFTS + 2):
        tokens = sum(chance**n for n in range(width))
        drafts = MAX_DRAFTS if has_confidences else width - 1
        seconds = costs.step(batch, width) + costs.draft(batch, drafts)
        best = max(best, tokens / seconds * costs.step(batch, 1))
    speed = mean_speed(machine, [always(chance)], batch, 8, has_confidences=has_confidences)
    assert speed >= max(FLOOR, 1.0 + 0.75 * (best - 1.0) - 0.06)


@BATCHES
@EVERY_MACHINE
def test_a_drafter_that_turns_bad_is_left_and_taken_up_again(machine: str, batch: int) -> None:
    options = {"num_tokens": 4000, "plain_steps": 3600}
    run, policy = simulate(MACHINES[machine], [turncoat], batch=batch, seed=1, **options)  # type: ignore[arg-type]
    assert run.speed >= FLOOR
    if run.speed > 1.1:
        # It paid before; the bad thousand tokens were decoded plainly; then it came back.
        assert policy.break_even.num_stops >= 1
        assert policy.break_even.num_probes >= 2
        assert max(run.widths[-200:]) > 1


def test_new_requests_profit_soon_from_a_drafter_that_came_back() -> None:
    """From the first probe on, which may be 512 steps after the bad times have ended."""
    shares = []
    for seed in range(4):
        quality = [0.85]
        policy = DraftPolicy(MAX_DRAFTS, width_rule=best_width, drafts_in_blocks=False)
        worker = Worker(
            policy,
            MACHINES["gpu"],
            batch=1,
            num_tokens=200,
            quality=[lambda _, now=quality: now[0]],  # type: ignore[misc]
            seed=seed,
        )
        for era, num_steps in [(0.85, 300), (0.0, 1500)]:
            quality[0] = era
            for _ in range(num_steps):
                worker.step()
        quality[0], num_probes = 0.85, policy.break_even.num_probes
        while policy.break_even.num_probes == num_probes:
            worker.step()
        before = worker.run.num_draft_steps
        for _ in range(200):
            worker.step()
        shares.append((worker.run.num_draft_steps - before) / 200)
    assert min(shares) > 0.9


def test_a_bad_request_stops_while_good_ones_of_its_batch_go_on() -> None:
    run, policy = simulate(
        MACHINES["gpu"], [always(0.9)] * 7 + [always(0.0)], batch=8, plain_steps=800, seed=4
    )
    assert run.speed > 2.0
    assert policy.gates.num_stops >= 2
    # A handful of windows and probes a request, not all of its 300 tokens.
    assert 0 < policy.gates.num_probes < 60


def test_requests_that_would_not_pay_alone_are_drafted_for_beside_others() -> None:
    """What they share of a step's price is paid by the others."""
    machine, poor = MACHINES["gpu"], always(0.12)
    alone, _ = simulate(machine, [poor], batch=1, plain_steps=800, seed=4)
    assert alone.num_draft_steps < 0.1 * alone.num_steps
    policy = DraftPolicy(MAX_DRAFTS, width_rule=best_width, drafts_in_blocks=False)
    for num_drafts in range(1, MAX_DRAFTS + 1):
        # What one more takes is known by what one takes.
        for _ in range(3):
            policy.costs.draft.observe(1, num_drafts, machine.draft(1, num_drafts))
    worker = Worker(
        policy, machine, batch=8, num_tokens=300, quality=[always(0.9)] * 6 + [poor] * 2, seed=4
    )
    for _ in range(300):
        worker.step()
    assert worker.run.num_draft_steps > 0.9 * worker.run.num_steps
    assert policy.gates.num_stops <= 2


@pytest.mark.parametrize("rule", [best_width, causal_width])
def test_both_width_rules_serve(rule: WidthRule) -> None:
    run, _ = simulate(
        MACHINES["gpu"],
        [always(0.8)],
        batch=8,
        plain_steps=400,
        seed=2,
        has_confidences=True,
        width_rule=rule,
    )
    assert run.speed > 1.8


def test_it_is_deterministic_given_its_inputs() -> None:
    runs = [
        simulate(MACHINES["cpu"], [always(0.7)], batch=3, plain_steps=300, seed=6)[0]
        for _ in range(2)
    ]
    assert runs[0].widths == runs[1].widths
    assert len(set(runs[0].widths)) > 2


def test_bug_32_a_saturated_batch_is_not_sped_down_by_a_fixed_length() -> None:
    machine, chance = MACHINES["saturated"], 0.6
    tokens = sum(chance**n for n in range(MAX_DRAFTS + 1))
    fixed = tokens * machine.step(64, 1) / (machine.step(64, 8) + machine.draft(64, 7))
    assert fixed < 0.6
    run, _ = simulate(machine, [always(chance)], batch=64, plain_steps=500, seed=3)
    assert run.speed >= FLOOR


def test_bug_33_drafts_that_confidence_cuts_off_are_never_verified() -> None:
    """The saving is in rows that are not computed: the cut comes before the step, not after."""
    run, policy = simulate(
        Machine(lambda b, w: 0.010 + 0.002 * (w - 1), lambda b, k: 0.001),
        [always(0.75)],
        batch=8,
        plain_steps=500,
        seed=5,
        has_confidences=True,
    )
    drafting = [width for width in run.widths if width > 1]
    assert len(drafting) > 50, "inconclusive: nothing was drafted"
    assert run.num_verified_rows == 8 * sum(run.widths)
    # All 7 drafts are proposed each time; far fewer have rows.
    assert statistics.mean(drafting) < 5.5
    assert policy.costs.step.num_observed(8, statistics.mode(drafting)) > 2


# -- single steps ------------------------------------------------------------------------------


def test_a_plain_steps_price_is_measured_before_anything_is_drafted() -> None:
    policy = DraftPolicy(3, width_rule=best_width, drafts_in_blocks=False)
    slot = policy.open()
    for _ in range(3):
        plan = policy.plan([slot], [3])
        assert plan == DraftPlan((0,), 1, reason=PlainReason.MEASURING, num_same=3)
        policy.costs.observe_step(1, 1, 1.0, has_prompt_rows=False)
    assert policy.plan([slot], [3]).num_wanted != (0,)
    assert policy.plain_steps == {PlainReason.MEASURING: 3}


def test_limits_of_a_sequence_bound_what_is_asked_for_it() -> None:
    policy, slots = measured_policy(batch=4)
    plan = policy.plan(slots, [9, 2, 0, 1])
    assert plan.num_wanted == (3, 2, 0, 1)
    assert policy.plan(slots, [0, 0, 0, 0]).reason is PlainReason.NOT_ALLOWED


def test_the_window_is_no_wider_than_the_drafts_that_came() -> None:
    policy, slots = measured_policy(batch=2)
    plan = policy.plan(slots, [3, 3])
    for num_drafts, width in [((0, 0), 1), ((1, 0), 2), ((3, 3), 4)]:
        assert (
            policy.width(
                plan,
                slots,
                limits=[3, 3],
                num_drafts=num_drafts,
                confidences=[[], []],
                draft_seconds=0.1,
            )
            == width
        )


def test_low_confidences_narrow_the_window() -> None:
    policy, slots = measured_policy()
    for width in range(1, 5):
        for _ in range(15):
            policy.costs.observe_step(1, width, 1.0 + 0.4 * (width - 1), has_prompt_rows=False)
    plan = DraftPlan((3,), 4)

    def width_for(*confidences: float) -> int:
        return policy.width(
            plan,
            slots,
            limits=[3],
            num_drafts=[3],
            confidences=[list(confidences)],
            draft_seconds=0.1,
        )

    assert width_for(0.97, 0.97, 0.97) == 4
    assert width_for(0.97, 0.97, 0.05) == 3
    assert width_for(0.05, 0.97, 0.97) == 1
    assert width_for(float("nan"), 0.97, 0.97) == 1


def test_nothing_is_trusted_that_was_not_measured() -> None:
    policy = DraftPolicy(3, width_rule=best_width, drafts_in_blocks=False)
    policy.begin_serving()
    assert policy.break_even.credit == INITIAL_CREDIT


def test_a_drafter_that_never_answers_is_asked_less_and_less() -> None:
    """Time-outs cost what they cost; no draft ever comes."""
    policy, slots = measured_policy()
    asked = 0
    for _ in range(500):
        plan = policy.plan(slots, [3])
        waits = max(plan.num_wanted)
        asked += waits > 0
        policy.record(
            outcome(
                slots,
                width=1,
                num_verified=[0],
                num_asked=waits,
                draft_seconds=0.5 if waits else 0.0,
                step_seconds=1.0,
            )
        )
    assert asked * 0.5 < 0.03 * 500
    assert policy.plain_steps[PlainReason.OVERSPENT] > 300


STEP = st.tuples(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),  # limits of the sequences
    st.integers(0, 3),  # drafts that come, at most
    st.integers(0, 3),  # drafts that agree, at most
    st.floats(1e-3, 5.0) | st.just(0.0),  # seconds of the step
    st.booleans(),  # with prompt rows
)


@given(st.lists(STEP, max_size=120), st.booleans(), st.booleans())
def test_any_history_gives_plans_within_their_limits(
    steps: list[tuple[list[int], int, int, float, bool]], in_blocks: bool, is_causal: bool
) -> None:
    rule = causal_width if is_causal else best_width
    policy = DraftPolicy(3, width_rule=rule, drafts_in_blocks=in_blocks)
    slots = [policy.open() for _ in range(6)]
    for limits, coming, agreeing, seconds, has_prompt_rows in steps:
        live = slots[: len(limits)]
        plan = policy.plan(live, limits)
        assert all(0 <= w <= min(x, 3) for w, x in zip(plan.num_wanted, limits, strict=True))
        assert (plan.reason is None) == (max(plan.num_wanted) > 0) == (plan.width > 1)
        given_drafts = [min(coming, wanted) for wanted in plan.num_wanted]
        confidences = [[0.5] * count for count in given_drafts]
        width = policy.width(
            plan,
            live,
            limits=limits,
            num_drafts=given_drafts,
            confidences=confidences,
            draft_seconds=0.1 * seconds,
        )
        assert 1 <= width <= 1 + max(given_drafts)
        verified = [min(count, width - 1) for count in given_drafts]
        policy.record(
            StepOutcome(
                slots=live,
                width=width,
                num_verified=verified,
                num_accepted=[min(agreeing, count) for count in verified],
                confidences=confidences,
                num_asked=max(plan.num_wanted),
                num_drafting=sum(wanted > 0 for wanted in plan.num_wanted),
                draft_seconds=0.1 * seconds if any(plan.num_wanted) else 0.0,
                step_seconds=seconds,
                has_prompt_rows=has_prompt_rows,
            )
        )


def test_slots_are_given_back() -> None:
    policy, slots = measured_policy(batch=2)
    policy.close(slots[0])
    with pytest.raises(ValueError, match="not open"):
        policy.close(slots[0])
    assert policy.open() == slots[0]


def worker_of(policy: DraftPolicy, quality: list[float], num_tokens: int) -> Worker:
    """One sequence after the other, drafted for as well as quality[0] says at the time."""
    return Worker(
        policy,
        MACHINES["saturated"],
        batch=1,
        num_tokens=num_tokens,
        quality=[lambda _: quality[0]],
        seed=1,
    )


def test_where_one_text_has_stopped_drafting_the_next_is_expected_to_be_drafted_for() -> None:
    policy, slots = measured_policy()
    for _ in range(100):
        policy.plan(slots, [3])
        policy.record(outcome(slots, num_accepted=[3]))
    for _ in range(100):
        if policy.plan(slots, [3]).reason is not None:
            break
        policy.record(outcome(slots, num_accepted=[0]))
    assert policy.break_even.reason is PlainReason.BELOW_BREAK_EVEN
    assert policy.steps_to_drafts(1) == 0
    assert not policy.stays_plain(1)
    assert policy.expects_drafts(), "a probe is near, for this one too"


def test_drafting_of_the_last_few_says_nothing_of_a_large_batch() -> None:
    """A batch runs down to one sequence, which is drafted for; the next batch is large again."""
    policy, _ = measured_policy()
    for _ in range(3):
        for width in range(1, 5):
            policy.costs.observe_step(64, width, 1.0 * width, has_prompt_rows=False)
        for drafts in range(1, 4):
            policy.costs.draft.observe(64, drafts, 0.5)
    assert policy.is_drafting
    assert not policy.stays_plain(64), "it is to be asked first"
    assert policy.steps_to_drafts(1) == 0
    assert 0 < policy.steps_to_drafts(64) <= 32


def test_off_it_need_not_be_asked_about_batches_that_would_not_be_drafted_for() -> None:
    policy, slots = measured_policy()
    for _ in range(3):
        policy.costs.observe_step(8, 1, 1.0, has_prompt_rows=False)
        policy.costs.observe_step(8, 4, 9.0, has_prompt_rows=False)
    for _ in range(200):
        policy.record(outcome(slots))
    assert policy.plan(slots, [3]).reason is PlainReason.BELOW_BREAK_EVEN
    assert policy.stays_plain(1)
    assert policy.stays_plain(8)
    for _ in range(300):
        policy.observe_acceptance(outcome(slots, num_accepted=[3]))
    assert policy.break_even.credit <= 0
    assert policy.stays_plain(1), "what was lost must be earned first"
    assert policy.steps_to_drafts(1) > 64
    assert not policy.expects_drafts()
    policy.break_even.credit = 0.5
    assert not policy.stays_plain(1), "a new text would be drafted for"
    assert policy.steps_to_drafts(1) == 0
    assert policy.stays_plain(8)


def test_where_no_text_is_drafted_well_none_is_expected_to_be_before_the_probe() -> None:
    policy = DraftPolicy(MAX_DRAFTS, width_rule=best_width, drafts_in_blocks=False)
    worker = worker_of(policy, [0.0], num_tokens=200)
    for _ in range(400):
        worker.step()
    assert not policy.is_drafting
    num_probes, num_steps = policy.break_even.num_probes, policy.steps_to_drafts(1)
    assert num_steps > 0
    while policy.break_even.num_probes == num_probes:
        worker.step()
        num_steps -= 1
    assert -64 < num_steps < 256, "looked at again after 256 steps at most"


def run_on_gpu(quality: float, *, batch: int, prompt_seconds: float, num_steps: int) -> Run:
    """Batches of sequences that are all drafted for equally well."""
    worker = Worker(
        DraftPolicy(MAX_DRAFTS, width_rule=best_width, drafts_in_blocks=False),
        MACHINES["gpu"],
        batch=batch,
        num_tokens=96,
        quality=[lambda _: quality],
        seed=1,
        prompt_seconds=prompt_seconds,
    )
    for _ in range(num_steps):
        worker.step()
    return worker.run


@pytest.mark.parametrize("prompt_seconds", [0.0, 0.005])
def test_a_hopeless_drafter_costs_little_however_long_prompts_take_it(
    prompt_seconds: float,
) -> None:
    """Told the prompts of eight sequences, it takes as long as ten plain steps."""
    run = run_on_gpu(0.0, batch=8, prompt_seconds=prompt_seconds, num_steps=3000)
    assert run.num_draft_steps > 1, "it is looked at now and then"
    assert run.speed > 0.985


@pytest.mark.parametrize(
    ("batch", "draft_seconds", "prompt_seconds"), [(1, 0.003, 0.002), (8, 0.0015, 0.001)]
)
def test_prompts_are_told_for_no_more_sequences_than_may_be_drafted_for(
    batch: int, draft_seconds: float, prompt_seconds: float
) -> None:
    """Texts begin badly, so that drafting is given up again and again while others would pay:
    taking the rows of all their prompts meanwhile costs more than the drafts that are lost."""
    policy = DraftPolicy(MAX_DRAFTS, width_rule=best_width, drafts_in_blocks=True)
    worker = Worker(
        policy,
        Machine(lambda b, w: 0.0015, lambda b, k: draft_seconds),
        batch=batch,
        num_tokens=96,
        quality=[lambda num_emitted: 0.45 if num_emitted < 16 else 0.7],
        seed=1,
        prompt_seconds=prompt_seconds,
    )
    for _ in range(3000):
        worker.step()
    assert worker.num_started > 30 * batch
    assert worker.num_expecting < 0.15 * worker.num_started
    assert worker.run.speed > 0.985


def test_a_good_drafter_is_kept_though_prompts_take_it_long() -> None:
    assert run_on_gpu(0.8, batch=4, prompt_seconds=0.004, num_steps=1500).speed > 1.5
