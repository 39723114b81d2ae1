"""The scheduler alone: budget, admission, chunking, preemption, prefix reuse, handoffs.

A toy executor stands for the ranks: the token after a prefix is a function of the prefix, so
whatever the scheduler does, a request's tokens must come out the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbraid.engine.scheduler import Scheduler, SchedulerLimits
from kvbraid.engine.sequence import EngineRequest, Sequence, SequenceKey, Source, Status
from kvbraid.engine.step_plan import (
    AddPages,
    Admit,
    AppendToken,
    BeginSend,
    BindSend,
    CloseGrant,
    EndSend,
    OpenGrant,
    Release,
    StepPlan,
)
from kvbraid.errors import InvalidRequestError, OverloadedError
from kvbraid.kv.kv_layout import KvLayout
from kvbraid.kv.page_allocator import PageAllocator
from kvbraid.kv.prefix_cache import PrefixCache
from kvbraid.request import FinishReason, SamplingParams
from kvbraid.transport.grant import Grant, RankEndpoint, new_transfer_id

LAYOUT = KvLayout("gqa", 1, 1, 1, 2, "float32", 1, 1, 4, 1, "digest")


def toy_token(prefix: Seq[int]) -> int:
    """The token after `prefix`."""
    return (sum((i + 1) * t for i, t in enumerate(prefix)) * 7 + len(prefix)) % 1000


def issue_grant(first: int, end: int) -> Grant:
    endpoint = RankEndpoint(0, "127.0.0.1:1", "", "", 2, 65536)
    return Grant(new_transfer_id(), 1, 1, first, end, LAYOUT, (endpoint,), 1000)


class ToyWorker:
    """Executes plans the way ranks do and checks what no rank could survive."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page: int = 4,
        cache_class: type[PrefixCache] = PrefixCache,
        **limits: int,
    ) -> None:
        defaults = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "prefill_chunk_tokens": 8,
            "max_num_waiting": 32,
            "max_model_len": 200,
        }
        self.page = page
        self.scheduler = Scheduler(
            SchedulerLimits(**(defaults | limits)),
            cache_class(PageAllocator(num_pages), page),
            logical_page_size=page,
            model_digest="digest",
            num_pool_tokens=(num_pages - 1) * page,
            issue_grant=issue_grant,
        )
        self.slots: dict[int, tuple[list[int], list[int]]] = {}
        self.finished: dict[SequenceKey, list[int]] = {}
        self.plans: list[StepPlan] = []
        # What each page's rows were computed from: the prefix up to and including the token.
        self.rows: dict[tuple[int, int], tuple[int, ...]] = {}

    def submit(
        self, name: str, prompt: Seq[int], max_tokens: int = 5, **fields: object
    ) -> Sequence:
        sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens)
        request = EngineRequest(SequenceKey(name, 0, 0), tuple(prompt), len(prompt), sampling)
        return self.scheduler.submit(dataclasses.replace(request, **fields))  # type: ignore[arg-type]

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        for operation in plan.operations:
            self._apply(operation)
        tokens = {}
        for decode in plan.decodes:
            known = self.slots[decode.slot][0]
            self._compute(decode.slot, len(known) - 1, 1)
            tokens[decode.slot] = (toy_token(known),)
        for extend in plan.extends:
            self._compute(extend.slot, extend.start, extend.length)
            if extend.sample:
                tokens[extend.slot] = (toy_token(self.slots[extend.slot][0]),)
        for slot, new in tokens.items():
            self.slots[slot][0].extend(new)
        for sequence, _ in self.scheduler.commit(plan, tokens):
            if sequence.finish_reason(self.scheduler.limits.max_model_len) is not None:
                self.finished[sequence.request.key] = sequence.token_ids
                self.scheduler.finish(sequence)
        return plan

    def _apply(self, operation: object) -> None:
        match operation:
            case Admit():
                assert operation.slot not in self.slots
                self.slots[operation.slot] = (list(operation.token_ids), list(operation.pages))
            case AddPages():
                self.slots[operation.slot][1].extend(operation.pages)
            case AppendToken():
                self.slots[operation.slot][0].append(operation.token_id)
            case Release():
                del self.slots[operation.slot]

    def _compute(self, slot: int, start: int, length: int) -> None:
        tokens, pages = self.slots[slot]
        for position in range(start):
            row = (pages[position // self.page], position % self.page)
            assert self.rows.get(row) == tuple(tokens[: position + 1]), "reads another's KV"
        for position in range(start, start + length):
            row = (pages[position // self.page], position % self.page)
            self.rows[row] = tuple(tokens[: position + 1])

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.num_running and not self.scheduler.num_waiting:
                return
            self.step()
        raise AssertionError("the scheduler makes no progress")


def expected(prompt: Seq[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(toy_token(tokens))
    return tokens


def test_a_long_prompt_runs_in_chunks_and_samples_once_at_its_end() -> None:
    worker = ToyWorker()
    worker.submit("a", range(1, 21), max_tokens=1)
    worker.run()
    extends = [e for p in worker.plans for e in p.extends]
    assert [(e.start, e.length, e.sample) for e in extends] == [
        (0, 8, False),
        (8, 8, False),
        (16, 4, True),
    ]


def test_a_step_never_exceeds_its_token_budget_and_decodes_come_first() -> None:
    worker = ToyWorker(max_num_batched_tokens=10)
    for i in range(6):
        worker.submit(f"r{i}", range(1 + i, 12 + i), max_tokens=9)
    worker.run()
    for plan in worker.plans:
        assert len(plan.decodes) + sum(e.length for e in plan.extends) <= 10
    assert any(plan.decodes and plan.extends for plan in worker.plans)
    for i in range(6):
        key = SequenceKey(f"r{i}", 0, 0)
        assert worker.finished[key] == expected(range(1 + i, 12 + i), 9)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=8),
    num_pages=st.integers(14, 40),
    chunk=st.integers(1, 9),
    num_tokens=st.integers(1, 20),
)
def test_tokens_do_not_depend_on_pool_size_chunking_or_company(
    prompts: list[list[int]], num_pages: int, chunk: int, num_tokens: int
) -> None:
    worker = ToyWorker(num_pages=num_pages, prefill_chunk_tokens=chunk)
    for i, prompt in enumerate(prompts):
        worker.submit(str(i), prompt, max_tokens=num_tokens)
    worker.run()
    for i, prompt in enumerate(prompts):
        assert worker.finished[SequenceKey(str(i), 0, 0)] == expected(prompt, num_tokens)
    counts = worker.scheduler.cache.counts()
    assert counts.active == 0
    assert counts.free + counts.cached == num_pages - 1


def test_a_full_pool_preempts_the_youngest_and_loses_no_token() -> None:
    worker = ToyWorker(num_pages=10, max_num_batched_tokens=64)
    worker.submit("old", range(10), max_tokens=22)
    worker.submit("young", range(20, 30), max_tokens=22)
    worker.run()
    assert worker.scheduler.num_preemptions > 0
    admits = [o for p in worker.plans for o in p.operations if isinstance(o, Admit)]
    assert [a.num_prompt_tokens for a in admits] == [10] * len(admits)
    assert all(a.token_ids[0] == 20 for a in admits[2:]), "only the younger one was sent back"
    assert worker.finished[SequenceKey("old", 0, 0)] == expected(range(10), 22)
    assert worker.finished[SequenceKey("young", 0, 0)] == expected(range(20, 30), 22)


def test_a_repeated_prompt_computes_only_what_is_not_cached_and_a_salt_keeps_it_apart() -> None:
    worker = ToyWorker(num_pages=200, max_num_batched_tokens=512, prefill_chunk_tokens=512)
    prompt = [i % 50 for i in range(150)]
    worker.submit("first", prompt, max_tokens=1)
    worker.run()
    again = worker.submit("again", prompt, max_tokens=1)
    salted = worker.submit("salted", prompt, max_tokens=1, cache_salt="x")
    worker.run()
    assert again.num_cached_tokens == 128  # two whole hash blocks
    assert salted.num_cached_tokens == 0
    assert worker.finished[again.request.key] == expected(prompt, 1)


def test_at_least_one_token_of_a_cached_prompt_is_computed() -> None:
    worker = ToyWorker(num_pages=200, max_num_batched_tokens=512, prefill_chunk_tokens=512)
    prompt = list(range(128))
    worker.submit("first", prompt, max_tokens=1)
    worker.run()
    again = worker.submit("again", prompt, max_tokens=1)
    worker.run()
    assert again.num_cached_tokens == 124
    assert worker.finished[again.request.key] == expected(prompt, 1)


def test_an_aborted_request_frees_its_pages_with_the_next_plan() -> None:
    worker = ToyWorker(max_num_seqs=1)
    running = worker.submit("a", range(20), max_tokens=50)
    waiting = worker.submit("b", range(5))
    worker.step()
    worker.scheduler.finish(running)
    worker.scheduler.finish(waiting)
    assert worker.scheduler.cache.counts().active == 0
    plan = worker.step()
    assert [type(o) for o in plan.operations] == [Release]
    assert not worker.slots
    assert worker.scheduler.schedule().is_empty


def test_what_can_never_fit_is_refused_with_the_limit() -> None:
    worker = ToyWorker(num_pages=10, max_model_len=30)
    for prompt in ([], range(30), range(40)):
        with pytest.raises(InvalidRequestError, match="takes 1 to 29"):
            worker.submit("x", prompt)


def test_a_full_queue_and_a_running_key_are_refused() -> None:
    worker = ToyWorker(max_num_waiting=2)
    worker.submit("a", [1])
    with pytest.raises(InvalidRequestError, match="running already"):
        worker.submit("a", [1])
    worker.submit("b", [1])
    with pytest.raises(OverloadedError, match="max_num_waiting 2"):
        worker.submit("c", [1])


def test_a_handoff_reserves_pages_computes_nothing_and_decodes_from_the_given_token() -> None:
    worker = ToyWorker()
    prompt = list(range(10))
    sequence = worker.submit("a", prompt, max_tokens=4, source=Source.HANDOFF)
    plan = worker.step()
    opened = [o for o in plan.operations if isinstance(o, OpenGrant)]
    assert len(opened) == 1
    assert (opened[0].grant["first_position"], opened[0].grant["end_position"]) == (0, 10)
    assert not plan.has_compute
    assert worker.step().is_empty
    for position in range(10):  # the rows arrive
        page = sequence.pages[position // 4]
        worker.rows[page, position % 4] = tuple(prompt[: position + 1])
    sequence.first_token_id = toy_token(prompt)
    worker.scheduler.resume_received(sequence)
    worker.run()
    assert worker.finished[sequence.request.key] == expected(prompt, 4)
    assert any(isinstance(o, CloseGrant) for p in worker.plans for o in p.operations)


def test_rows_that_the_decode_worker_holds_are_not_granted_again() -> None:
    worker = ToyWorker(num_pages=200, max_num_batched_tokens=512, prefill_chunk_tokens=512)
    prompt = [i % 50 for i in range(150)]
    worker.submit("first", prompt, max_tokens=1)
    worker.run()
    sequence = worker.submit("second", prompt, source=Source.HANDOFF)
    worker.step()
    assert sequence.grant is not None
    assert (sequence.grant.first_position, sequence.grant.end_position) == (128, 150)
    assert sequence.num_cached_tokens == 128


def test_a_sending_sequence_is_never_preempted_and_keeps_its_pages_until_it_ends() -> None:
    worker = ToyWorker(num_pages=12, max_num_batched_tokens=64, prefill_chunk_tokens=32)
    sent = worker.submit("send", range(12), destination=issue_grant(0, 12), max_tokens=9)
    plan = worker.step()
    kinds = [type(o) for o in plan.operations]
    assert kinds == [BeginSend, Admit, BindSend]
    sent.status = Status.SENDING
    worker.submit("a", range(40, 50), max_tokens=20)
    worker.submit("b", range(60, 64), max_tokens=20)
    while worker.scheduler.num_running > 1 or worker.scheduler.num_waiting:
        worker.step()
    assert sent.status is Status.SENDING
    assert len(sent.pages) == 3
    worker.scheduler.finish(sent)
    assert any(isinstance(o, EndSend) for o in worker.step().operations)


def test_finish_reasons_respect_stop_tokens_min_tokens_and_limits() -> None:
    sampling = SamplingParams(seed=1, stop_token_ids=(7,), min_tokens=2, max_tokens=4)
    request = EngineRequest(SequenceKey("a", 0, 0), (1, 2), 2, sampling)
    sequence = Sequence(request, [1, 2, 7], [])
    assert sequence.finish_reason(100) is None
    sequence.token_ids = [1, 2, 5, 5, 7]
    assert sequence.finish_reason(100) is FinishReason.STOP
    sequence.token_ids = [1, 2, 5, 5, 5, 5]
    assert sequence.finish_reason(100) is FinishReason.LENGTH
    sequence.token_ids = [1, 2, 5]
    assert sequence.finish_reason(3) is FinishReason.LENGTH


def test_a_prompt_that_waits_keeps_its_lease_and_gives_it_up_when_it_ends() -> None:
    worker = ToyWorker(max_num_seqs=1)
    worker.submit("first", range(10), max_tokens=50)
    worker.step()
    waiting = worker.submit("second", range(20, 30), destination=issue_grant(0, 10))
    assert [type(o) for o in worker.step().operations] == [BeginSend]
    assert waiting.status is Status.WAITING
    worker.scheduler.finish(waiting)
    assert [type(o) for o in worker.step().operations] == [EndSend]


class CountingCache(PrefixCache):
    """Counts how often the cache is searched."""

    num_matches = 0

    def match(self, hashes: Seq[bytes], num_tokens: int) -> list[int]:
        self.num_matches += 1
        return super().match(hashes, num_tokens)


class RestlessCache(PrefixCache):
    """One that always claims to have changed."""

    num_reads = 0

    @property
    def version(self) -> int:
        self.num_reads += 1
        return self.num_reads


def test_a_queue_head_without_room_is_looked_up_only_after_something_was_released() -> None:
    worker = ToyWorker(num_pages=24, max_num_batched_tokens=64, cache_class=CountingCache)
    worker.submit("running", range(20), max_tokens=30)
    worker.submit("also running", range(30, 40), max_tokens=12)
    worker.submit("head", range(40, 110), max_tokens=2)
    cache = worker.scheduler.cache
    assert isinstance(cache, CountingCache)
    worker.step()
    while worker.scheduler.num_waiting:
        worker.step()
    assert len(worker.plans) > 25
    assert cache.num_matches <= 2 + 1 + 2, "two admissions, one refusal, one look a release"
    worker.run()
    assert worker.finished[SequenceKey("head", 0, 0)] == expected(range(40, 110), 2)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 2)), min_size=2, max_size=8),
    num_pages=st.integers(29, 50),
    num_tokens=st.integers(1, 20),
)
def test_looking_only_after_a_release_plans_the_same_steps(
    prompts: list[tuple[int, int]], num_pages: int, num_tokens: int
) -> None:
    plans = []
    for cache_class in (PrefixCache, RestlessCache):
        worker = ToyWorker(num_pages=num_pages, max_num_batched_tokens=64, cache_class=cache_class)
        for i, (length, kind) in enumerate(prompts):
            worker.submit(str(i), [kind] * length, max_tokens=num_tokens)
        worker.run()
        plans.append(worker.plans)
    assert plans[0] == plans[1]


def test_prompt_tokens_that_wait_are_those_to_compute_here() -> None:
    worker = ToyWorker(max_num_seqs=2)
    worker.submit("a", range(20))
    assert worker.scheduler.num_waiting_tokens == 20
    worker.step()
    assert worker.scheduler.num_waiting_tokens == 12
    while worker.scheduler.num_waiting_tokens:
        worker.step()
    assert [len(s.token_ids) for s in worker.scheduler.active] == [21], "it decodes, and waits not"
    for name, source in (("b", Source.HANDOFF), ("c", Source.HANDOFF), ("d", Source.COMPUTE)):
        worker.submit(name, range(30, 37), source=source)
    assert worker.scheduler.num_waiting_tokens == 7
