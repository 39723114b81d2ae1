"""Rank 0's loop with a toy executor: aborts, handoffs, failures and their events, in one thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvbraid.engine.events import PromptSent
from kvbraid.engine.kv_exchange import TransferProgress, failure_code
from kvbraid.engine.rank_executor import StepOutput
from kvbraid.engine.sequence import EngineRequest, SequenceKey, Source, Status
from kvbraid.engine.step_plan import CloseGrant, EndSend, Release, StepPlan
from kvbraid.errors import (
    DataLossError,
    InvalidRequestError,
    KVBraidError,
    LeaseLostError,
    UnavailableError,
)
from kvbraid.request import FinishReason, SamplingParams
from kvbraid.worker.request_streams import RequestStreams
from tools.scripted_engine import (
    COMPLETE,
    Script,
    ScriptedEngine,
    key_of,
    make_grant,
)
from tools.toy_rank import expected, toy_token


def test_an_abort_is_answered_after_the_release_and_ends_the_stream() -> None:
    world = ScriptedEngine()
    released_when_told: list[tuple[bool, bool]] = []

    def done(found: bool) -> None:
        released_when_told.append(
            (found, any(isinstance(o, Release) for o in world.rank.operations))
        )

    def script() -> Script:
        world.submit("a", range(20), max_tokens=100)
        yield from world.until(lambda: len(world.tokens("a")) > 2)
        world.engine.abort(key_of("a"), done)
        world.engine.abort(key_of("nobody"), done)

    world.run(script())
    assert released_when_told == [(True, True), (False, True)]
    assert world.chunks("a")[-1].chunk.token_ids == ()
    assert world.chunks("a")[-1].chunk.finish_reason is FinishReason.ABORT


def test_a_preempted_request_can_be_aborted_while_it_waits() -> None:
    world = ScriptedEngine(num_pages=10)
    found: list[bool] = []

    def script() -> Script:
        world.submit("old", range(10), max_tokens=22)
        world.submit("young", range(20, 30), max_tokens=22)
        yield from world.until(lambda: world.scheduler.num_preemptions > 0)
        world.engine.abort(key_of("young"), found.append)

    world.run(script())
    assert found == [True]
    assert world.tokens("old") == expected(range(10), 22)


@pytest.mark.parametrize("rows_first", [True, False])
def test_a_handoff_decodes_once_rows_and_token_are_here_in_either_order(rows_first: bool) -> None:
    world = ScriptedEngine()
    prompt = list(range(10))
    first = toy_token(prompt)

    def start() -> None:
        world.engine.start_received(key_of("a"), world.grant("a").transfer_id, first)

    def rows() -> None:
        world.complete_arrival("a")

    def script() -> Script:
        world.submit("a", prompt, max_tokens=4, source=Source.HANDOFF)
        yield from world.until(lambda: world.is_granted("a"))
        for happen in (rows, start) if rows_first else (start, rows):
            happen()
            yield
            yield

    world.run(script())
    assert [first, *world.tokens("a")] == expected(prompt, 4)
    assert sum(isinstance(o, CloseGrant) for o in world.rank.operations) == 1


@pytest.mark.parametrize("second", ["same", "other"])
def test_a_first_token_told_twice_changes_nothing(second: str) -> None:
    world = ScriptedEngine()
    prompt = list(range(10))
    first = toy_token(prompt)
    again = first if second == "same" else first + 1

    def script() -> Script:
        world.submit("a", prompt, max_tokens=20, source=Source.HANDOFF)
        yield from world.until(lambda: world.is_granted("a"))
        transfer_id = world.grant("a").transfer_id
        world.engine.start_received(key_of("a"), transfer_id, first)
        world.engine.start_received(key_of("a"), transfer_id, again)
        world.complete_arrival("a")
        yield from world.until(lambda: len(world.tokens("a")) > 1)
        world.engine.start_received(key_of("a"), transfer_id, again)

    world.run(script())
    assert not world.failures("a")
    assert [first, *world.tokens("a")] == expected(prompt, 20)


def test_a_first_token_under_another_transfer_is_a_lost_lease_and_without_a_sequence_nothing() -> (
    None
):
    world = ScriptedEngine()

    def script() -> Script:
        world.engine.start_received(key_of("unknown"), b"x" * 16, 1)
        world.submit("a", range(10), source=Source.HANDOFF)
        yield from world.until(lambda: world.is_granted("a"))
        world.engine.start_received(key_of("a"), b"x" * 16, 1)

    world.run(script())
    assert world.told("unknown") == []
    assert [type(e) for e in world.failures("a")] == [LeaseLostError]


def test_a_failed_transfer_fails_its_request_with_the_class_that_the_rank_met() -> None:
    world = ScriptedEngine()

    def script() -> Script:
        world.submit("a", range(10), source=Source.HANDOFF)
        world.submit("b", range(50, 60), max_tokens=9)
        yield from world.until(lambda: world.is_granted("a"))
        code = failure_code(DataLossError("damaged"))
        world.progress[world.grant("a").transfer_id] = TransferProgress(0, code, 3, 24)

    world.run(script())
    assert [type(e) for e in world.failures("a")] == [DataLossError]
    assert world.tokens("b") == expected(range(50, 60), 9)
    assert any(isinstance(o, CloseGrant) for o in world.rank.operations)


def test_a_transfer_in_use_is_refused_and_the_engine_goes_on() -> None:
    world = ScriptedEngine()
    grant = make_grant(0, 10)

    def script() -> Script:
        world.submit("first", range(10), destination=grant)
        world.submit("second", range(10), destination=grant)
        yield from world.until(lambda: bool(world.failures("second")) and world.tokens("first"))
        world.progress[grant.transfer_id] = COMPLETE
        yield from world.until(lambda: any(isinstance(e, PromptSent) for e in world.events))
        world.submit("third", range(10), destination=grant)  # free again
        yield from world.until(lambda: bool(world.tokens("third")))

    world.run(script())
    assert [type(e) for e in world.failures("second")] == [InvalidRequestError]
    assert not world.failures("third")
    assert sum(isinstance(o, EndSend) for o in world.rank.operations) == 2


def test_kv_behind_logits_that_are_not_finite_is_never_found_by_another_request() -> None:
    world = ScriptedEngine()
    prompt = [i % 50 for i in range(130)]
    world.rank.broken_prompts.add(tuple(prompt))

    def script() -> Script:
        world.submit("broken", prompt)
        world.submit("other", range(10), max_tokens=4)
        yield from world.until(lambda: bool(world.failures("broken")))
        world.rank.broken_prompts.clear()
        world.submit("again", prompt, max_tokens=3)

    world.run(script())
    assert [type(e) for e in world.failures("broken")] == [KVBraidError]
    assert world.chunks("again")[0].num_cached_tokens == 0
    assert world.tokens("again") == expected(prompt, 3)
    assert world.tokens("other") == expected(range(10), 4)


def test_cached_pages_that_give_no_finite_logits_are_computed_anew() -> None:
    """Also what others made from them: a longer prompt that begins alike, and one that runs now."""
    world = ScriptedEngine()
    prompt = [i % 50 for i in range(130)]
    longer = [*prompt, *range(70)]

    def script() -> Script:
        world.submit("first", longer, max_tokens=1)
        yield from world.until(lambda: bool(world.tokens("first")))
        world.rank.poisoned_pages |= set(range(world.num_pages))
        world.submit("victim", prompt, max_tokens=3)
        yield from world.until(lambda: bool(world.failures("victim")))
        assert world.scheduler.cache.counts().cached == 0
        world.submit("again", prompt, max_tokens=3)
        yield from world.until(lambda: len(world.tokens("again")) == 3)
        world.submit("longer", longer, max_tokens=2)

    world.run(script())
    assert [type(e) for e in world.failures("victim")] == [KVBraidError]
    assert world.chunks("again")[0].num_cached_tokens == 0
    assert world.tokens("again") == expected(prompt, 3)
    assert world.chunks("longer")[0].num_cached_tokens == 128, "only what was computed anew"
    assert world.tokens("longer") == expected(longer, 2)


def test_a_sequence_that_shares_untrusted_pages_leaves_none_of_them_behind() -> None:
    world = ScriptedEngine()
    prompt = [i % 50 for i in range(130)]

    def script() -> Script:
        world.submit("first", prompt, max_tokens=1)
        yield from world.until(lambda: bool(world.tokens("first")))
        world.submit("sharer", prompt, max_tokens=50)
        yield from world.until(lambda: len(world.tokens("sharer")) > 2)
        world.rank.broken_prompts.add((*prompt, 7))
        world.submit("victim", [*prompt, 7], max_tokens=3)
        yield from world.until(lambda: bool(world.failures("victim")))
        world.engine.abort(key_of("sharer"), lambda found: None)
        yield from world.until(lambda: world.scheduler.num_running == 0)
        world.submit("again", prompt, max_tokens=3)

    world.run(script())
    assert world.chunks("again")[0].num_cached_tokens == 0
    assert world.tokens("again") == expected(prompt, 3)


@pytest.mark.parametrize(("keeps", "cached"), [(True, 128), (False, 0)])
def test_prefixes_are_kept_only_where_the_settings_say_so(keeps: bool, cached: int) -> None:
    world = ScriptedEngine(keeps_prefixes=keeps)
    prompt = [i % 50 for i in range(130)]

    def script() -> Script:
        world.submit("first", prompt, max_tokens=1)
        yield from world.until(lambda: bool(world.tokens("first")))
        world.submit("second", prompt, max_tokens=1)

    world.run(script())
    assert world.chunks("second")[0].num_cached_tokens == cached


def test_the_queue_can_be_counted_while_it_changes() -> None:
    world = ScriptedEngine()

    class Racing(list[int]):
        """A sequence that arrives while another thread counts."""

        def __len__(self) -> int:
            if world.scheduler.num_waiting < 4:
                number = world.scheduler.num_waiting
                sampling = SamplingParams(seed=1, max_tokens=1)
                world.scheduler.submit(EngineRequest(key_of(f"r{number}"), (1, 2), 2, sampling))
            return super().__len__()

    sampling = SamplingParams(seed=1, max_tokens=1)
    for name in ("a", "b"):
        sequence = world.scheduler.submit(EngineRequest(key_of(name), (1, 2), 2, sampling))
        sequence.token_ids = Racing(sequence.token_ids)
    assert world.scheduler.num_waiting_tokens == 4


def test_a_refused_request_is_told_of_and_leaves_nothing_behind() -> None:
    world = ScriptedEngine()

    def script() -> Script:
        world.submit("long", range(250))
        yield from world.until(lambda: bool(world.failures("long")))

    world.run(script())
    assert [type(e) for e in world.failures("long")] == [InvalidRequestError]
    assert world.scheduler.find(key_of("long")) is None


class SilentEngine:
    """Takes messages and never answers, as one whose thread has ended or is stuck."""

    def __init__(self) -> None:
        self.aborted: list[SequenceKey] = []

    def submit(self, request: EngineRequest) -> None:
        pass

    def abort(self, key: SequenceKey, done: Callable[[bool], None]) -> None:
        self.aborted.append(key)

    def report_rows(self, done: Callable[[object], None]) -> None:
        pass


def _streams(engine: SilentEngine | None = None) -> RequestStreams:
    streams = RequestStreams(asyncio.get_running_loop())
    streams.attach(engine or SilentEngine())  # type: ignore[arg-type]
    return streams


def _request(name: str) -> EngineRequest:
    return EngineRequest(key_of(name), (1, 2), 2, SamplingParams(seed=1, max_tokens=1))


async def test_nobody_waits_for_an_engine_that_has_ended() -> None:
    streams = _streams()

    async def read() -> None:
        async with streams.open(_request("a")) as events:
            await events.next()

    waiting = [asyncio.create_task(work) for work in (read(), streams.report_rows())]
    waiting.append(asyncio.create_task(streams.abort(key_of("b"))))
    await asyncio.sleep(0)
    streams.end()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(r) for r in results] == [UnavailableError] * 3
    with pytest.raises(UnavailableError):
        async with streams.open(_request("c")):
            pass


async def test_a_stuck_engine_is_given_up_and_told_to_free_what_its_requests_held() -> None:
    engine = SilentEngine()
    streams = _streams(engine)
    error = UnavailableError("stuck")

    async def read(name: str) -> None:
        async with streams.open(_request(name)) as events:
            await events.next()

    waiting = [asyncio.create_task(work) for work in (read("a"), streams.report_rows())]
    await asyncio.sleep(0)
    streams.give_up(error)
    streams.give_up(error)
    assert await asyncio.gather(*waiting, return_exceptions=True) == [error, error]
    assert engine.aborted == [key_of("a")]
    later = asyncio.create_task(read("b"))
    await asyncio.sleep(0)
    assert not later.done(), "what comes later may still be answered"
    streams.give_up(error)
    with pytest.raises(UnavailableError):
        await later


async def test_a_call_cancelled_again_while_it_aborts_still_frees_its_key() -> None:
    streams = _streams()

    async def read() -> None:
        async with streams.open(_request("a")) as events:
            await events.next()

    task = asyncio.create_task(read())
    for _ in range(2):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    again = asyncio.create_task(read())
    await asyncio.sleep(0)
    assert not again.done(), "the key is still taken"
    streams.end()
    with pytest.raises(UnavailableError):
        await again


def test_a_running_sequence_of_a_prefill_is_sending_until_every_row_is_acknowledged() -> None:
    world = ScriptedEngine()
    grant = make_grant(0, 10)
    seen: list[Status] = []

    def script() -> Script:
        world.submit("a", range(10), destination=grant, max_tokens=9)
        yield from world.until(lambda: bool(world.tokens("a")))
        yield
        sequence = world.scheduler.find(key_of("a"))
        assert sequence is not None
        seen.append(sequence.status)
        world.progress[grant.transfer_id] = COMPLETE

    world.run(script())
    assert seen == [Status.SENDING]
    assert world.tokens("a") == expected(range(10), 1)
    assert isinstance(world.events[-1], PromptSent)


def test_beside_a_device_tokens_are_told_when_the_next_step_is_launched_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Scripted steps take no time: as if they were long.
    monkeypatch.setattr("kvbraid.engine.news._WAIT_PER_SEQUENCE_S", 0.0)

    def run(is_device_apart: bool) -> tuple[ScriptedEngine, list[tuple[int, int]]]:
        engine = ScriptedEngine(is_device_apart=is_device_apart)
        told: list[tuple[int, int]] = []
        compute = engine.rank.compute

        def counting(plan: StepPlan) -> StepOutput:
            told.append((sum(p.has_compute for p in engine.plans), len(engine.events)))
            return compute(plan)

        engine.rank.compute = counting  # type: ignore[method-assign]

        def script() -> Script:
            engine.submit("a", [1, 2, 3], max_tokens=5)
            yield from engine.until(lambda: bool(engine.tokens("a")))
            engine.submit("b", [4, 5], max_tokens=3)
            yield

        engine.run(script())
        return engine, told

    (at_once, told_at_once), (apart, told_apart) = run(False), run(True)
    assert [e for e in apart.events if e.key == key_of("a")] == [
        e for e in at_once.events if e.key == key_of("a")
    ]
    assert apart.tokens("b") == at_once.tokens("b") == expected([4, 5], 3)
    # When a step computes, what the step before it gave is told, however late that was.
    assert told_apart == told_at_once


def test_beside_a_device_nothing_is_kept_back_when_the_engine_fails() -> None:
    engine = ScriptedEngine(is_device_apart=True)
    compute = engine.rank.compute

    def fail_at_the_third(plan: StepPlan) -> StepOutput:
        if len(engine.plans) == 3:
            raise RuntimeError("the device is gone")
        return compute(plan)

    engine.rank.compute = fail_at_the_third  # type: ignore[method-assign]

    def script() -> Script:
        engine.submit("a", [1, 2, 3], max_tokens=9)
        yield

    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.run(script())
    assert engine.tokens("a") == expected([1, 2, 3], 2)
