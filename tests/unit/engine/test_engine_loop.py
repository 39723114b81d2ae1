"""Rank 0's loop with a toy executor: aborts, handoffs, failures and their events, in one thread.

The token after a prefix is a function of the prefix. A script runs one step ahead of the engine,
between planning and committing, which is where messages of other threads may come at worst.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import numpy as np
import pytest

from kvbraid.engine.engine import Engine
from kvbraid.engine.events import EngineEvent, GrantReady, PromptSent, RequestFailed, TokensReady
from kvbraid.engine.kv_exchange import TransferProgress, failure_code
from kvbraid.engine.rank_executor import StepOutput
from kvbraid.engine.scheduler import Scheduler, SchedulerLimits
from kvbraid.engine.sequence import EngineRequest, SequenceKey, Source, Status
from kvbraid.engine.step_plan import (
    Admit,
    AppendToken,
    CloseGrant,
    EndSend,
    Release,
    StepPlan,
    Stop,
)
from kvbraid.errors import (
    DataLossError,
    InvalidRequestError,
    KVBraidError,
    LeaseLostError,
    UnavailableError,
)
from kvbraid.kv.kv_layout import KvLayout
from kvbraid.kv.page_allocator import PageAllocator
from kvbraid.kv.prefix_cache import PrefixCache
from kvbraid.request import FinishReason, SamplingParams
from kvbraid.transport.grant import Grant, RankEndpoint, new_transfer_id
from kvbraid.worker.request_streams import RequestStreams

LAYOUT = KvLayout("gqa", 1, 1, 1, 2, "float32", 1, 1, 4, 1, "digest")
COMPLETE = TransferProgress(is_complete=1, failure=0, num_rows=10, num_bytes=80)
Script = Iterator[None]


def toy_token(prefix: Seq[int]) -> int:
    return (sum((i + 1) * t for i, t in enumerate(prefix)) * 7 + len(prefix)) % 1000


def expected(prompt: Seq[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(toy_token(tokens))
    return tokens[len(prompt) :]


def make_grant(first: int, end: int) -> Grant:
    endpoint = RankEndpoint(0, "127.0.0.1:1", "", "", 2, 65536)
    return Grant(new_transfer_id(), 1, 1, first, end, LAYOUT, (endpoint,), 1000)


def key_of(name: str) -> SequenceKey:
    return SequenceKey(name, 0, 0)


class World:
    """An engine, the one rank that it commands, and what it told."""

    def __init__(self, *, num_pages: int = 64, keeps_prefixes: bool = True, **limits: int) -> None:
        defaults = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 256,
            "prefill_chunk_tokens": 256,
            "max_num_waiting": 32,
            "max_model_len": 250,
        }
        self.scheduler = Scheduler(
            SchedulerLimits(**(defaults | limits)),
            PrefixCache(PageAllocator(num_pages), 4),
            logical_page_size=4,
            model_digest="digest",
            num_pool_tokens=(num_pages - 1) * 4,
            issue_grant=make_grant,
            keeps_prefixes=keeps_prefixes,
        )
        self.engine = Engine(
            scheduler=self.scheduler,
            executor=self,  # type: ignore[arg-type]
            channel=self,
            on_event=self._on_event,
            on_step=lambda report: None,
        )
        self.events: list[EngineEvent] = []
        self.operations: list[object] = []
        self.slots: dict[int, list[int]] = {}
        self.progress: dict[bytes, TransferProgress] = {}
        self.broken_prompts: set[tuple[int, ...]] = set()
        self._script: Script = iter(())

    def _on_event(self, event: EngineEvent) -> None:
        self.events.append(event)

    # The channel and the executor.

    def send(self, plan: object) -> None:
        """One rank: nobody to tell."""

    def move_rows(self) -> bool:
        self._advance()
        return True  # do not sleep: the script has more to say

    def execute(self, plan: StepPlan) -> StepOutput:
        for operation in plan.operations:
            self._apply(operation)
        output = self._compute(plan)
        self._advance()
        rows = [[self.progress.get(t, TransferProgress(0, 0, 0, 0)) for t in plan.collect]]
        return dataclasses.replace(
            output,
            progress=np.array(rows, dtype=np.int64) if plan.collect else None,
            stopped=any(isinstance(o, Stop) for o in plan.operations),
        )

    def _apply(self, operation: object) -> None:
        self.operations.append(operation)
        match operation:
            case Admit():
                assert operation.slot not in self.slots
                self.slots[operation.slot] = list(operation.token_ids)
            case AppendToken():
                self.slots[operation.slot].append(operation.token_id)
            case Release():
                del self.slots[operation.slot]

    def _compute(self, plan: StepPlan) -> StepOutput:
        tokens: dict[int, int] = {}
        invalid: list[int] = []
        for slot in (*plan.decodes, *(e.slot for e in plan.extends if e.sample)):
            if tuple(self.slots[slot]) in self.broken_prompts:
                invalid.append(slot)
                continue
            tokens[slot] = toy_token(self.slots[slot])
            self.slots[slot].append(tokens[slot])
        return StepOutput(tokens, invalid=tuple(invalid))

    # The script.

    def run(self, script: Script) -> None:
        """Run the engine beside `script` until both have nothing more to do."""
        self._script = script
        self.engine.run()
        counts = self.scheduler.cache.counts()
        assert counts.active == 0, "pages leaked"
        assert not self.slots, "slots leaked"

    def _advance(self) -> None:
        try:
            next(self._script)
        except StopIteration:
            if not self.engine.has_work:
                self.engine.stop()

    def until(self, holds: Callable[[], bool]) -> Script:
        for _ in range(200):
            if holds():
                return
            yield
        raise AssertionError("it never came")

    def submit(self, name: str, prompt: Seq[int], max_tokens: int = 5, **fields: object) -> None:
        sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens)
        request = EngineRequest(key_of(name), tuple(prompt), len(prompt), sampling)
        self.engine.submit(dataclasses.replace(request, **fields))  # type: ignore[arg-type]

    # What was told.

    def tokens(self, name: str) -> list[int]:
        return [t for e in self.chunks(name) for t in e.chunk.token_ids]

    def chunks(self, name: str) -> list[TokensReady]:
        key = key_of(name)
        return [e for e in self.events if isinstance(e, TokensReady) and e.key == key]

    def failures(self, name: str) -> list[KVBraidError]:
        key = key_of(name)
        return [e.error for e in self.events if isinstance(e, RequestFailed) and e.key == key]

    def grant(self, name: str) -> Grant:
        key = key_of(name)
        return next(e.grant for e in self.events if isinstance(e, GrantReady) and e.key == key)

    def is_granted(self, name: str) -> bool:
        return any(isinstance(e, GrantReady) and e.key == key_of(name) for e in self.events)


def test_an_abort_is_answered_after_the_release_and_ends_the_stream() -> None:
    world = World()
    released_when_told: list[tuple[bool, bool]] = []

    def done(found: bool) -> None:
        released_when_told.append((found, any(isinstance(o, Release) for o in world.operations)))

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
    world = World(num_pages=10)
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
    world = World()
    prompt = list(range(10))
    first = toy_token(prompt)

    def start() -> None:
        world.engine.start_received(key_of("a"), world.grant("a").transfer_id, first)

    def rows() -> None:
        world.progress[world.grant("a").transfer_id] = COMPLETE

    def script() -> Script:
        world.submit("a", prompt, max_tokens=4, source=Source.HANDOFF)
        yield from world.until(lambda: world.is_granted("a"))
        for happen in (rows, start) if rows_first else (start, rows):
            happen()
            yield
            yield

    world.run(script())
    assert [first, *world.tokens("a")] == expected(prompt, 4)
    assert sum(isinstance(o, CloseGrant) for o in world.operations) == 1


@pytest.mark.parametrize("second", ["same", "other"])
def test_a_first_token_told_twice_changes_nothing(second: str) -> None:
    world = World()
    prompt = list(range(10))
    first = toy_token(prompt)
    again = first if second == "same" else first + 1

    def script() -> Script:
        world.submit("a", prompt, max_tokens=20, source=Source.HANDOFF)
        yield from world.until(lambda: world.is_granted("a"))
        transfer_id = world.grant("a").transfer_id
        world.engine.start_received(key_of("a"), transfer_id, first)
        world.engine.start_received(key_of("a"), transfer_id, again)
        world.progress[transfer_id] = COMPLETE
        yield from world.until(lambda: len(world.tokens("a")) > 1)
        world.engine.start_received(key_of("a"), transfer_id, again)

    world.run(script())
    assert not world.failures("a")
    assert [first, *world.tokens("a")] == expected(prompt, 20)


def test_a_first_token_without_its_sequence_or_transfer_is_a_lost_lease() -> None:
    world = World()

    def script() -> Script:
        world.engine.start_received(key_of("unknown"), b"x" * 16, 1)
        world.submit("a", range(10), source=Source.HANDOFF)
        yield from world.until(lambda: world.is_granted("a"))
        world.engine.start_received(key_of("a"), b"x" * 16, 1)

    world.run(script())
    assert [type(e) for e in world.failures("unknown")] == [LeaseLostError]
    assert [type(e) for e in world.failures("a")] == [LeaseLostError]


def test_a_failed_transfer_fails_its_request_with_the_class_that_the_rank_met() -> None:
    world = World()

    def script() -> Script:
        world.submit("a", range(10), source=Source.HANDOFF)
        world.submit("b", range(50, 60), max_tokens=9)
        yield from world.until(lambda: world.is_granted("a"))
        code = failure_code(DataLossError("damaged"))
        world.progress[world.grant("a").transfer_id] = TransferProgress(0, code, 3, 24)

    world.run(script())
    assert [type(e) for e in world.failures("a")] == [DataLossError]
    assert world.tokens("b") == expected(range(50, 60), 9)
    assert any(isinstance(o, CloseGrant) for o in world.operations)


def test_a_transfer_in_use_is_refused_and_the_engine_goes_on() -> None:
    world = World()
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
    assert sum(isinstance(o, EndSend) for o in world.operations) == 2


def test_kv_behind_logits_that_are_not_finite_is_never_found_by_another_request() -> None:
    world = World()
    prompt = [i % 50 for i in range(130)]
    world.broken_prompts.add(tuple(prompt))

    def script() -> Script:
        world.submit("broken", prompt)
        world.submit("other", range(10), max_tokens=4)
        yield from world.until(lambda: bool(world.failures("broken")))
        world.broken_prompts.clear()
        world.submit("again", prompt, max_tokens=3)

    world.run(script())
    assert [type(e) for e in world.failures("broken")] == [KVBraidError]
    assert world.chunks("again")[0].num_cached_tokens == 0
    assert world.tokens("again") == expected(prompt, 3)
    assert world.tokens("other") == expected(range(10), 4)


@pytest.mark.parametrize(("keeps", "cached"), [(True, 128), (False, 0)])
def test_prefixes_are_kept_only_where_the_settings_say_so(keeps: bool, cached: int) -> None:
    world = World(keeps_prefixes=keeps)
    prompt = [i % 50 for i in range(130)]

    def script() -> Script:
        world.submit("first", prompt, max_tokens=1)
        yield from world.until(lambda: bool(world.tokens("first")))
        world.submit("second", prompt, max_tokens=1)

    world.run(script())
    assert world.chunks("second")[0].num_cached_tokens == cached


def test_the_queue_can_be_counted_while_it_changes() -> None:
    world = World()

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
    world = World()

    def script() -> Script:
        world.submit("long", range(250))
        yield from world.until(lambda: bool(world.failures("long")))

    world.run(script())
    assert [type(e) for e in world.failures("long")] == [InvalidRequestError]
    assert world.scheduler.find(key_of("long")) is None


class SilentEngine:
    """Takes messages and never answers, as one whose thread has ended."""

    def submit(self, request: EngineRequest) -> None:
        pass

    def abort(self, key: SequenceKey, done: Callable[[bool], None]) -> None:
        pass

    def report_rows(self, done: Callable[[object], None]) -> None:
        pass


def _streams() -> RequestStreams:
    streams = RequestStreams(asyncio.get_running_loop())
    streams.attach(SilentEngine())  # type: ignore[arg-type]
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
    world = World()
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
