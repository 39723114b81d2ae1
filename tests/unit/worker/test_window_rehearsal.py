"""What a worker runs before it serves: a text with drafts, and on a GPU every window at every usual
batch size."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvbraid.engine.sequence import EngineRequest
from kvbraid.speculative.break_even import INITIAL_CREDIT, TRUSTED_CREDIT
from kvbraid.speculative.draft_plan import StepOutcome
from kvbraid.speculative.draft_policy import DraftPolicy
from kvbraid.speculative.fixed_policy import FixedPolicy
from kvbraid.speculative.verify_budget import best_width
from kvbraid.worker.drafter_check import check_drafter
from kvbraid.worker.window_rehearsal import batch_sizes, rehearse_windows

MAX_DRAFTS = 3
# The first step of a kind compiles.
COMPILE_S, STEP_S, ROW_S, DRAFT_S, PLAN_S = 5.0, 1.0, 0.1, 0.2, 0.1


class ScriptedWorker:
    """Runs the sequences that are open together, as an engine would."""

    def __init__(
        self,
        speculation: Any,
        max_num_seqs: int,
        num_pool_tokens: int = 10_000,
        num_agreeing: int = 0,
    ) -> None:
        """num_agreeing: drafts of a window that come true."""
        self.identity = SimpleNamespace(
            max_num_seqs=max_num_seqs, num_pool_tokens=num_pool_tokens, max_model_len=500
        )
        self.streams = self
        self.requests: list[EngineRequest] = []
        self.met: Counter[tuple[int, int]] = Counter()
        # Steps without drafts, by size and whether drafts are in sight, so that taps are kept.
        self.met_plain: set[tuple[int, bool]] = set()
        self._speculation = speculation
        self._num_agreeing = num_agreeing
        self._num_open = 0

    def sampling_for(self, sampling: Any, token_ids: Any, num_prompt_tokens: int) -> Any:
        return sampling

    @asynccontextmanager
    async def open(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[object]]:
        self.requests.append(request)
        self._num_open += 1
        yield self._events(request)
        self._num_open -= 1

    async def _events(self, request: EngineRequest) -> AsyncIterator[object]:
        await asyncio.sleep(0)  # the others of its batch are opened meanwhile
        if request.key.completion == 0:
            assert request.sampling.max_tokens is not None
            num_quiet = 0
            for left in range(request.sampling.max_tokens, 0, -1):
                if num_quiet:
                    num_quiet -= 1
                    self._quiet_step(self._num_open)
                else:
                    num_quiet = self._step(self._num_open, left)
        yield object()

    def _quiet_step(self, size: int) -> None:
        """A plan and its books take a tenth of a step."""
        self.met[size, 1] += 1
        self._speculation.policy.skip(1, {size: [STEP_S + ROW_S * size]})

    def _step(self, size: int, left: int) -> int:
        policy = self._speculation.policy
        plan = policy.plan(list(range(size)), [left - 1] * size)
        num_drafts = max(plan.num_wanted)
        width = 1 + num_drafts
        if width == 1:
            self.met_plain.add((size, policy.steps_to_drafts(size) == 0))
        is_first = not self.met[size, width]
        self.met[size, width] += 1
        policy.record(
            StepOutcome(
                slots=list(range(size)),
                width=width,
                num_verified=[num_drafts] * size,
                num_accepted=[min(self._num_agreeing, num_drafts)] * size,
                confidences=[()] * size,
                num_asked=num_drafts,
                num_drafting=size if num_drafts else 0,
                draft_seconds=DRAFT_S * num_drafts + is_first * COMPILE_S,
                step_seconds=STEP_S
                + ROW_S * size * width
                + is_first * COMPILE_S
                + (width == 1) * PLAN_S,
                has_prompt_rows=False,
            )
        )
        return plan.num_same


def adaptive() -> DraftPolicy:
    return DraftPolicy(MAX_DRAFTS, width_rule=best_width, drafts_in_blocks=False)


async def test_every_window_is_met_and_its_usual_cost_known() -> None:
    policy = adaptive()
    speculation = SimpleNamespace(policy=policy)
    worker = ScriptedWorker(speculation, max_num_seqs=5)
    await rehearse_windows(worker, speculation, [1, 2, 3])  # type: ignore[arg-type]
    assert speculation.policy is policy
    for size in (1, 2, 4, 5):
        seconds = policy.costs.step.seconds(size)
        assert seconds is not None
        for width in range(1, MAX_DRAFTS + 2):
            assert worker.met[size, width] >= 4
            assert seconds[width - 1] == pytest.approx(STEP_S + ROW_S * size * width)
        assert {(size, True), (size, False)} <= worker.met_plain
        drafts = policy.costs.draft.seconds(size)
        assert drafts is not None
        assert list(drafts) == pytest.approx([DRAFT_S * n for n in range(1, MAX_DRAFTS + 1)])
        assert policy.costs.steps_since_plain(size) == 0


async def test_nothing_is_learnt_of_the_drafter_itself() -> None:
    policy = adaptive()
    rates, credit = policy.rates.shared.copy(), policy.break_even.credit
    speculation = SimpleNamespace(policy=policy)
    await rehearse_windows(ScriptedWorker(speculation, 2), speculation, [1])  # type: ignore[arg-type]
    assert (policy.rates.shared == rates).all()
    assert policy.break_even.credit == credit


@pytest.mark.parametrize(("num_agreeing", "is_drafted_for"), [(0, False), (2, True)])
async def test_the_first_client_is_drafted_for_where_the_check_was_passed(
    num_agreeing: int, is_drafted_for: bool
) -> None:
    policy = adaptive()
    speculation: Any = SimpleNamespace(policy=policy, max_draft_tokens=MAX_DRAFTS)
    worker: Any = ScriptedWorker(speculation, 2, num_agreeing=num_agreeing)
    await check_drafter(worker, speculation, [1])
    await rehearse_windows(worker, speculation, [1])
    assert speculation.policy is policy
    policy.begin_serving()
    assert policy.break_even.credit == (TRUSTED_CREDIT if is_drafted_for else INITIAL_CREDIT)
    assert any(policy.plan([policy.open()], [MAX_DRAFTS]).num_wanted) is is_drafted_for
    assert bool(policy.rates.shared[0] > 0.9) is is_drafted_for


async def test_a_fixed_policy_has_no_choice_to_rehearse() -> None:
    speculation = SimpleNamespace(policy=FixedPolicy(MAX_DRAFTS))
    worker = ScriptedWorker(speculation, 4)
    await rehearse_windows(worker, speculation, [1])  # type: ignore[arg-type]
    assert not worker.requests


async def test_each_sequence_has_a_key_of_its_own() -> None:
    speculation = SimpleNamespace(policy=adaptive())
    worker = ScriptedWorker(speculation, 4)
    await rehearse_windows(worker, speculation, [1])  # type: ignore[arg-type]
    keys = [request.key for request in worker.requests]
    assert len(set(keys)) == len(keys) == (1 + 2 + 4) * (MAX_DRAFTS + 2)


@pytest.mark.parametrize(
    ("max_num_seqs", "num_pool_tokens", "expected"),
    [
        (1, 1000, [1]),
        (8, 1000, [1, 2, 4, 8]),
        (10, 1000, [1, 2, 4, 8, 10]),
        (512, 100_000, [1, 2, 4, 8, 16, 32, 64]),
        (64, 120, [1, 2, 4, 6]),
        (64, 10, []),
    ],
)
def test_batch_sizes(max_num_seqs: int, num_pool_tokens: int, expected: list[int]) -> None:
    identity = SimpleNamespace(max_num_seqs=max_num_seqs, num_pool_tokens=num_pool_tokens)
    assert batch_sizes(identity, 20) == expected  # type: ignore[arg-type]
