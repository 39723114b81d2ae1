"""Two or three ranks with a toy model: clean runs pass, and each kind of drift stops every rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.single_group import SingleGroup
from kvbraid.engine.debug_guard import DigestGuard, NoGuard, RankMismatchError, make_guard
from kvbraid.engine.model_runner import WindowedDecode
from kvbraid.engine.rank_executor import RankExecutor
from kvbraid.engine.rank_state import RankSequence, RankState
from kvbraid.engine.sampler import SampleResult
from kvbraid.engine.step_plan import AddPages, Admit, Decode, Extend, StepPlan
from kvbraid.engine.verification import ExactMatch
from kvbraid.request import SamplingParams

FAULTY = 1
PLANS = [
    StepPlan(
        operations=(
            Admit(0, SamplingParams(seed=1), 5, 3, 0, (7, 8, 9), (4,)),
            Admit(1, SamplingParams(seed=1), 6, 2, 0, (1, 2), (2,)),
        ),
        extends=(Extend(0, 0, 3, True), Extend(1, 0, 1, False)),
    ),
    StepPlan(
        operations=(AddPages(0, (6,)),), decodes=(Decode(0),), extends=(Extend(1, 1, 1, True),)
    ),
    StepPlan(decodes=(Decode(0), Decode(1))),
    StepPlan(confirm=True),
    StepPlan(decodes=(Decode(0, (12, 40)), Decode(1, (5,)))),
]


class ToyRunner:
    """The next token is one more than the newest; no model and no pool."""

    def __init__(self) -> None:
        self.offset = 1

    def forward(
        self, decode: WindowedDecode, extends: Sequence[Extend], *, with_taps: bool
    ) -> Tensor:
        return torch.zeros(len(decode.sequences) + sum(e.sample for e in extends), 1)

    def renew_pages(self, pages: Sequence[int], num_computed: int) -> None:
        pass

    def sample(
        self, logits: Tensor, sequences: Sequence[RankSequence], assumed: Sequence[tuple[int, ...]]
    ) -> SampleResult:
        rows = zip(sequences, assumed, strict=True)
        tokens = torch.tensor([s.token_ids[-1] + self.offset + len(drafts) for s, drafts in rows])
        valid = torch.ones(len(sequences), dtype=torch.bool)
        return SampleResult(tokens, valid, [None] * len(sequences))


class NoExchange:
    """No rows come or go."""

    def move_rows(self) -> bool:
        return False

    def rows_computed(self, slot: int, end_position: int) -> None:
        pass


Break = Callable[[int, StepPlan, RankState, ToyRunner], StepPlan]


def sound(step: int, plan: StepPlan, state: RankState, runner: ToyRunner) -> StepPlan:
    return plan


def other_token(step: int, plan: StepPlan, state: RankState, runner: ToyRunner) -> StepPlan:
    if step == 3:
        state[0].token_ids[-1] ^= 1
    return plan


def other_length(step: int, plan: StepPlan, state: RankState, runner: ToyRunner) -> StepPlan:
    if step == 3:
        state[1].token_ids.insert(0, 3)
    return plan


def other_chunk(step: int, plan: StepPlan, state: RankState, runner: ToyRunner) -> StepPlan:
    if step == 2:
        state[1].token_ids[1] = 5
    return plan


def other_page(step: int, plan: StepPlan, state: RankState, runner: ToyRunner) -> StepPlan:
    if step == 3:
        state.page_table[0, 1] = 9
    return plan


def other_sample(step: int, plan: StepPlan, state: RankState, runner: ToyRunner) -> StepPlan:
    runner.offset = 2 if step == 2 else 1
    return plan


def other_draft(step: int, plan: StepPlan, state: RankState, runner: ToyRunner) -> StepPlan:
    return StepPlan(decodes=(Decode(0, (12, 41)), plan.decodes[1])) if step == 5 else plan


def other_anchor(step: int, plan: StepPlan, state: RankState, runner: ToyRunner) -> StepPlan:
    if step == 5:
        state[1].token_ids[-1] ^= 1
    return plan


def other_acceptance(step: int, plan: StepPlan, state: RankState, runner: ToyRunner) -> StepPlan:
    runner.offset = 3 if step == 5 else 1
    return plan


def other_plan(step: int, plan: StepPlan, state: RankState, runner: ToyRunner) -> StepPlan:
    return StepPlan(confirm=True, report_rows=True) if step == 4 else plan


def run_rank(group: Any, damage: Break, plans: Sequence[StepPlan] = PLANS) -> str:
    """Executes the plans; what the rank complained of, empty when nothing."""
    state, runner = RankState(2, 4), ToyRunner()
    executor = RankExecutor(
        runner=runner,  # type: ignore[arg-type]
        state=state,
        exchange=NoExchange(),  # type: ignore[arg-type]
        control_group=group,
        guard=make_guard(True, group, state),
        verification=ExactMatch(),
    )
    for step, plan in enumerate(plans, start=1):
        drifts = damage if group.rank == FAULTY else sound
        try:
            executor.execute(drifts(step, plan, state, runner))
        except RankMismatchError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("damage", "step", "what"),
    [
        (other_token, 3, "token window"),
        (other_length, 3, "token window"),
        (other_chunk, 2, "token window"),
        (other_page, 3, "page tables"),
        (other_sample, 2, "sampled ids"),
        (other_plan, 4, "step plan"),
        (other_draft, 5, "step plan"),
        (other_anchor, 5, "token window"),
        (other_acceptance, 5, "sampled ids"),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_every_rank_stops_at_the_first_step_that_differs_and_names_rank_and_part(
    as_threads: Callable[..., list[str]], size: int, damage: Break, step: int, what: str
) -> None:
    complaints = as_threads(size, lambda group: run_rank(group, damage))
    assert len(set(complaints)) == 1
    start = f"step {step}: the {what} of rank {FAULTY} differs from rank 0's"
    assert complaints[0].startswith(start), complaints[0]
    digests = re.findall(r"[0-9a-f]{16}", complaints[0])
    assert len(digests) == size
    assert len(set(digests)) == 2


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_agree_pass(as_threads: Callable[..., list[str]], size: int) -> None:
    assert as_threads(size, lambda group: run_rank(group, sound)) == [""] * size


def test_the_guard_is_there_only_when_wanted_and_when_there_is_something_to_compare(
    as_threads: Callable[..., list[bool]],
) -> None:
    state = RankState(1, 1)
    assert isinstance(make_guard(True, SingleGroup(), state), NoGuard)

    def one(group: Any) -> bool:
        unwanted = make_guard(False, group, state)
        return isinstance(unwanted, NoGuard) and isinstance(
            make_guard(True, group, state), DigestGuard
        )

    assert as_threads(2, one) == [True, True]
