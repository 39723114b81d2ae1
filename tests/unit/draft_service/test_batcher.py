"""What is computed with what, and in which order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from functools import partial

import pytest
import torch
from prometheus_client import CollectorRegistry

from draft_service.batcher import Batcher, Computed, Job
from kvbraid.speculative.proposal import Answer, DraftTask, Proposal, Resync
from kvbraid.telemetry.speculation_metrics import DraftMetrics


class Recorder:
    """A proposer that writes down its calls, in order."""

    num_sequences = 3
    num_evicted = 0
    num_free_tokens = 64

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def step(self, tasks: Sequence[DraftTask]) -> list[Answer]:
        self.calls.append([task.key for task in tasks])
        return [Proposal((len(self.calls),)) for _ in tasks]

    def drop(self, key: str) -> None:
        self.calls.append([f"drop {key}"])
        self.num_sequences -= 1


class Bench:
    """A batcher whose thread is started by hand, so that what waits is known."""

    def __init__(self, window_s: float = 0.0) -> None:
        self.proposer = Recorder()
        self.registry = CollectorRegistry()
        self.batcher = Batcher(
            self.proposer,
            window_s=window_s,
            max_batch=4,
            max_chunk_rows=8,
            metrics=DraftMetrics(self.registry),
        )
        self.done: list[asyncio.Future[Computed | None]] = []
        self._thread = threading.Thread(target=self.batcher.run)

    def submit(self, *keys: str, stream: int | None = None, rows: int = 1, drops: str = "") -> None:
        tasks = [DraftTask(k, 0, torch.zeros(rows, 2), (1,) * rows, 1, 0) for k in keys]
        done: asyncio.Future[Computed | None] = asyncio.get_running_loop().create_future()
        self.done.append(done)
        on_done = partial(done.get_loop().call_soon_threadsafe, done.set_result)
        self.batcher.submit(Job(tasks, on_done, stream=stream, dropped=[*drops]))

    async def run(self) -> list[list[str]]:
        self._thread.start()
        async with asyncio.timeout(10):
            await asyncio.gather(*self.done)
        return self.proposer.calls

    async def close(self) -> None:
        self.batcher.close()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    running = Bench()
    yield running
    await running.close()


async def test_steps_of_several_streams_are_one_batch_up_to_its_size(bench: Bench) -> None:
    for stream, keys in enumerate(["ab", "c", "de", "f"]):
        bench.submit(*keys, stream=stream)
    assert await bench.run() == [["a", "b", "c"], ["d", "e", "f"]]
    answers = [done.result() for done in bench.done]
    assert [a.answers for a in answers if a] == [
        (Proposal((1,)),) * 2, (Proposal((1,)),), (Proposal((2,)),) * 2, (Proposal((2,)),)
    ]  # fmt: skip


async def test_one_step_larger_than_a_batch_is_taken_whole(bench: Bench) -> None:
    bench.submit(*"abcdef", stream=1)
    assert await bench.run() == [[*"abcdef"]]


async def test_no_sequence_is_twice_in_a_batch(bench: Bench) -> None:
    bench.submit("a", stream=1)
    bench.submit("a", "b", stream=2)
    bench.submit("c", stream=3)
    assert await bench.run() == [["a"], ["a", "b", "c"]]


async def test_steps_go_first_and_neither_kind_starves(bench: Bench) -> None:
    bench.submit("p", rows=8)
    bench.submit("q", rows=8)
    bench.submit("a", stream=1)
    bench.submit("a", stream=1)
    assert await bench.run() == [["a"], ["p"], ["a"], ["q"]]


async def test_chunks_share_a_batch_up_to_its_rows(bench: Bench) -> None:
    for key, rows in [("p", 4), ("q", 4), ("r", 1), ("s", 100)]:
        bench.submit(key, rows=rows)
    assert await bench.run() == [["p", "q"], ["r"], ["s"]]


async def test_a_dropped_sequence_goes_before_its_step_and_after_earlier_ones(
    bench: Bench,
) -> None:
    bench.submit("a", stream=1)
    bench.submit("b", stream=2, drops="a")
    bench.submit(stream=3, drops="c")
    assert await bench.run() == [["a"], ["drop a"], ["drop c"], ["b"]]


async def test_chunks_of_a_sequence_that_has_ended_do_not_begin_it_again(bench: Bench) -> None:
    for key in "aab":
        bench.submit(key, rows=8)
    bench.submit("c", stream=1, drops="a")
    assert await bench.run() == [["drop a"], ["c"], ["b"]]
    answers = [done.result() for done in bench.done]
    assert [a.answers for a in answers if a] == [
        (Resync(0),), (Resync(0),), (Proposal((3,)),), (Proposal((2,)),)
    ]  # fmt: skip
    assert bench.registry.get_sample_value("kvbraid_draft_queued_sequences") == 0


async def test_a_step_waits_for_those_of_other_active_streams(bench: Bench) -> None:
    patient = Bench(window_s=5.0)
    patient.submit("a", stream=1)
    patient.submit("b", stream=2)
    assert await patient.run() == [["a", "b"]]
    patient.done.clear()
    patient.submit("a", stream=1)
    patient.submit("b", stream=2)
    async with asyncio.timeout(10):
        await asyncio.gather(*patient.done)
    assert patient.proposer.calls[1:] == [["a", "b"]]
    await patient.close()


async def test_a_stream_that_has_ended_keeps_nobody_waiting() -> None:
    patient = Bench(window_s=3600.0)
    patient.submit("a", stream=1)
    patient.submit("b", stream=2)
    await patient.run()
    patient.batcher.forget(2)
    patient.done.clear()
    patient.submit("a", stream=1)
    async with asyncio.timeout(10):
        await patient.done[0]
    await patient.close()


async def test_what_waits_when_it_closes_is_told(bench: Bench) -> None:
    bench.submit("a", stream=1)
    bench.submit("p")
    bench.batcher.close()
    bench.submit("b", stream=2)
    assert await bench.run() == []
    assert [done.result() for done in bench.done] == [None] * 3


async def test_what_is_held_is_shown_after_the_last_sequences_are_dropped(bench: Bench) -> None:
    bench.submit("a", stream=1)
    bench.submit(stream=1, drops="abc")
    await bench.run()
    async with asyncio.timeout(10):
        while bench.registry.get_sample_value("kvbraid_draft_held_sequences") != 0:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
