"""The profile of step costs before a decode worker serves, on a worker that is simulated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvbraid.engine.sequence import EngineRequest
from kvbraid.request import SamplingParams
from kvbraid.speculative.draft_policy import DraftPolicy, StepOutcome
from kvbraid.speculative.fixed_policy import FixedPolicy
from kvbraid.speculative.verify_budget import best_width
from kvbraid.worker import cost_profile
from kvbraid.worker.cost_profile import profile_costs, widths_by_size

NUM_DRAFTS = 7
STEP_S = 0.010
PROMPT = list(range(100))


def seconds(num_sequences: int, width: int) -> float:
    return STEP_S * (1 + 0.05 * num_sequences * width)


@dataclass
class SimulatedWorker:
    """Runs the requests that are open together, by the policy at hand. num_accepted: drafts of
    each window that come true; num_given: most that the drafter gives."""

    num_accepted: int = 0
    num_given: int = NUM_DRAFTS
    max_num_seqs: int = 4
    max_model_len: int = 200
    clock: float = 0.0
    open_requests: list[EngineRequest] = field(default_factory=list)
    num_requests: int = 0
    speculation: Any = None

    def __post_init__(self) -> None:
        self.identity = SimpleNamespace(
            max_num_seqs=self.max_num_seqs, num_pool_tokens=1000, max_model_len=self.max_model_len
        )
        self.streams = self

    def sampling_for(self, sampling: SamplingParams, *_: object) -> SamplingParams:
        return sampling

    @asynccontextmanager
    async def open(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[None]]:
        assert request.sampling.max_tokens is not None
        assert len(request.token_ids) + request.sampling.max_tokens <= self.max_model_len
        self.open_requests.append(request)
        self.num_requests += 1
        yield self._events()

    async def _events(self) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        if self.open_requests:
            max_tokens = self.open_requests[0].sampling.max_tokens
            assert max_tokens is not None
            self._run(len(self.open_requests), max_tokens - 1)
            self.open_requests = []
        yield

    def _run(self, size: int, num_left: int) -> None:
        policy = self.speculation.policy
        while num_left > 0:
            plan = policy.plan(range(size), [num_left - 1] * size)
            given = min(plan.num_wanted[0], self.num_given)
            accepted = min(self.num_accepted, given)
            self.clock += seconds(size, 1 + given)
            policy.record(
                StepOutcome(
                    slots=list(range(size)), width=1 + given, num_verified=[given] * size,
                    num_accepted=[accepted] * size, confidences=[()] * size,
                    num_asked=plan.num_wanted[0], num_drafting=size, draft_seconds=0.001,
                    step_seconds=seconds(size, 1 + given), has_prompt_rows=False,
                )
            )  # fmt: skip
            num_left -= 1 + accepted


async def profiled(
    worker: SimulatedWorker, monkeypatch: pytest.MonkeyPatch, limit_s: float = 100.0
) -> DraftPolicy:
    policy = DraftPolicy(NUM_DRAFTS, width_rule=best_width, drafts_in_blocks=True)
    worker.speculation = SimpleNamespace(policy=policy)
    monkeypatch.setattr(cost_profile, "time", SimpleNamespace(monotonic=lambda: worker.clock))
    await profile_costs(worker, worker.speculation, PROMPT, limit_s=limit_s)  # type: ignore[arg-type]
    assert worker.speculation.policy == policy, "the policy is back in its place"
    return policy


def test_widths_are_timed_as_often_as_they_need() -> None:
    assert widths_by_size(4, 4) == [(1, [1, 1, 1, 2, 2, 4, 4]), (4, [1, 1, 1, 2, 2, 4, 4])]


@pytest.mark.parametrize("num_accepted", [0, 1, 3, 7])
async def test_costs_are_known_whatever_is_accepted(
    num_accepted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = await profiled(SimulatedWorker(num_accepted), monkeypatch)
    for size in (1, 4):
        assert policy.costs.plain_seconds(size) == seconds(size, 1)
        row = policy.costs.step.seconds(size)
        assert row is not None
        for width in (1, 2, 4, 8):
            assert policy.costs.step.is_measured(size, width), (size, width)
            assert row[width - 1] == pytest.approx(seconds(size, width))
    # Of what came true nothing is learnt: all sequences generate one text.
    assert policy.break_even.num_stops == 0
    plan = policy.plan([policy.open()], [NUM_DRAFTS])
    assert plan.num_wanted[0] > 0, "the first client's first step may draft already"


@pytest.mark.parametrize("limit_s", [0.0, 0.05, 0.2, 0.5])
async def test_it_ends_in_time(limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SimulatedWorker(max_num_seqs=64)
    await profiled(worker, monkeypatch, limit_s)
    # Of the first sizes nothing is known yet: it is run whole.
    assert worker.clock <= max(limit_s, 20 * seconds(1, 8)) * 1.2
    assert (worker.num_requests == 0) == (limit_s == 0)


async def test_a_drafter_that_gives_nothing_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SimulatedWorker(num_given=0)
    policy = await profiled(worker, monkeypatch)
    assert policy.costs.step.largest_measured(1) == 1
    assert worker.num_requests < 30


async def test_a_short_context_is_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = await profiled(SimulatedWorker(max_model_len=20), monkeypatch)
    assert policy.costs.plain_seconds(1) is not None


async def test_a_fixed_policy_needs_no_costs() -> None:
    worker = SimulatedWorker()
    speculation: Any = SimpleNamespace(policy=FixedPolicy(3))
    await profile_costs(worker, speculation, PROMPT, limit_s=5.0)  # type: ignore[arg-type]
    assert worker.num_requests == 0
