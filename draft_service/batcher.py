"""Steps of several decode workers and chunks of prompts, computed in one thread, in batches."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from kvbraid.speculative.proposal import Answer, DraftTask, Proposal, Resync
from kvbraid.telemetry.speculation_metrics import DraftMetrics

# A stream whose last step is older does not keep others waiting.
_ACTIVE_S = 0.05
_OBSERVE_DELAY_S = 0.001


class Proposes(Protocol):
    """What computes: `kvbraid.speculative.proposer.Proposer`. Used by one thread."""

    @property
    def num_sequences(self) -> int:
        """Sequences held."""
        ...

    @property
    def num_evicted(self) -> int:
        """Sequences that lost their rows for others' room, since the start."""
        ...

    @property
    def num_free_tokens(self) -> int:
        """Rows that its KV has room for now."""
        ...

    def step(self, tasks: Sequence[DraftTask]) -> list[Answer]:
        """One answer a task, in order; no two tasks of one key."""
        ...

    def drop(self, key: str) -> None:
        """The sequence has ended; an unknown key is ignored."""
        ...


@dataclass(frozen=True, slots=True)
class Computed:
    """Answers of one job, and its times in seconds."""

    answers: tuple[Answer, ...]
    queue_s: float
    compute_s: float


@dataclass(slots=True, eq=False)
class Job:
    """Tasks of one step (stream: whose) or of one chunk of a prompt (stream None).

    dropped: forgotten before, with the chunks that wait. on_computed: called in the compute thread,
    before on_done, which waits for a turn of the event loop. on_done: called once, in the event
    loop, with None when the batcher was closed first.
    """

    tasks: Sequence[DraftTask]
    on_done: Callable[[Computed | None], None]
    stream: int | None = None
    dropped: Sequence[str] = ()
    on_computed: Callable[[Computed], None] | None = None
    queued_at: float = field(default_factory=time.monotonic)

    @property
    def num_rows(self) -> int:
        """Rows of all tasks."""
        return sum(len(task.next_token_ids) for task in self.tasks)


class Batcher:
    """Runs `proposer` in the thread that calls `run`; `submit`, `forget` and `close` are the
    loop's.

    Steps go first, but a chunk follows every batch of steps, so neither waits for more than one
    batch of the other. window_s: how long a step waits for those of other active streams.
    max_batch: most tasks of a batch. max_chunk_rows: most rows of a batch of chunks.
    """

    def __init__(
        self,
        proposer: Proposes,
        *,
        window_s: float,
        max_batch: int,
        max_chunk_rows: int,
        metrics: DraftMetrics,
    ) -> None:
        self._proposer = proposer
        self._window_s = window_s
        self._max_batch = max_batch
        self._max_chunk_rows = max_chunk_rows
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        # None: closed. A queue, because a step waits for nothing else: it wakes the other thread
        # in half the time of a condition.
        self._arrivals: SimpleQueue[Job | None] = SimpleQueue()
        self._is_closed = False
        self._num_pool_tokens = proposer.num_free_tokens
        self._num_evicted = 0
        # The compute thread's own.
        self._steps: deque[Job] = deque()
        self._chunks: deque[Job] = deque()
        self._last_step_at: dict[int, float] = {}
        self._is_chunk_turn = False

    # Event loop

    def submit(self, job: Job) -> None:
        """Queue a job."""
        if self._is_closed:
            job.on_done(None)
            return
        self._metrics.queued_sequences.inc(len(job.tasks))
        self._arrivals.put(job)

    def forget(self, stream: int) -> None:
        """A stream has ended: nobody waits for its steps."""
        self._last_step_at.pop(stream, None)

    def close(self) -> None:
        """End `run` after the batch that it computes now; what waits is not computed."""
        self._is_closed = True
        self._arrivals.put(None)

    def _deliver(self, computed: Sequence[tuple[Job, Computed]]) -> None:
        for job, result in computed:
            job.on_done(result)
        # Counted once the answers are on their way.
        self._loop.call_later(_OBSERVE_DELAY_S, self._observe, computed)

    def _observe(self, computed: Sequence[tuple[Job, Computed]]) -> None:
        # Also of jobs that only drop sequences: often the last ones of a stream.
        self._observe_held()
        if not any(job.tasks for job, _ in computed):
            return
        job, result = computed[0]
        self._metrics.observe_part(
            "propose" if job.stream is not None else "ingest", result.compute_s
        )
        self._metrics.observe_batch(
            num_sequences=sum(len(job.tasks) for job, _ in computed),
            num_rows=sum(
                len(task.next_token_ids)
                for job, result in computed
                for task, answer in zip(job.tasks, result.answers, strict=True)
                if not isinstance(answer, Resync)
            ),
            num_proposed=sum(
                len(answer.token_ids)
                for _, result in computed
                for answer in result.answers
                if isinstance(answer, Proposal)
            ),
        )
        for job, result in computed:
            if job.stream is not None:
                self._metrics.queue_seconds.observe(result.queue_s)

    def _observe_held(self) -> None:
        proposer, metrics = self._proposer, self._metrics
        metrics.held_sequences.set(proposer.num_sequences)
        num_free, num_evicted = proposer.num_free_tokens, proposer.num_evicted
        metrics.set_pool(num_used=max(0, self._num_pool_tokens - num_free), num_free=num_free)
        metrics.count_evicted(num_evicted - self._num_evicted)
        self._num_evicted = num_evicted

    # Compute thread

    def run(self) -> None:
        """Compute until `close`."""
        while not self._is_closed:
            self._compute(self._next_batch())
        left = [*self._steps, *self._chunks]
        while not self._arrivals.empty():
            if (job := self._arrivals.get()) is not None:
                left.append(job)
        for job in left:
            self._loop.call_soon_threadsafe(job.on_done, None)

    def _next_batch(self) -> list[Job]:
        """The next jobs, no sequence twice; none once closed."""
        if not self._steps and not self._chunks:
            self._file(self._arrivals.get())
        while not self._arrivals.empty():
            self._file(self._arrivals.get())
        if self._is_closed:
            return []
        if self._chunks and (self._is_chunk_turn or not self._steps):
            self._is_chunk_turn = False
            return self._take(self._chunks, self._max_chunk_rows)
        self._await_other_streams()
        self._is_chunk_turn = True
        return self._take(self._steps, None)

    def _file(self, job: Job | None) -> None:
        if job is None:
            return
        if job.stream is None:
            self._chunks.append(job)
            return
        self._steps.append(job)
        self._last_step_at[job.stream] = job.queued_at

    def _await_other_streams(self) -> None:
        now = time.monotonic()
        if len(self._last_step_at) < 2:
            return
        for stream, at in list(self._last_step_at.items()):
            if now - at > _ACTIVE_S:
                self.forget(stream)
        active = set(self._last_step_at)
        if len(active) < 2:
            return
        missing = active - {job.stream for job in self._steps}
        give_up = now + self._window_s
        while missing and not self._is_closed and (left := give_up - time.monotonic()) > 0:
            try:
                job = self._arrivals.get(timeout=left)
            except Empty:
                return
            self._file(job)
            if job is not None:
                missing.discard(job.stream if job.stream is not None else -1)

    def _take(self, queue: deque[Job], max_rows: int | None) -> list[Job]:
        batch: list[Job] = []
        keys: set[str] = set()
        num_rows = 0
        while queue:
            job = queue[0]
            own = {task.key for task in job.tasks}
            num_rows += job.num_rows
            is_full = len(keys) + len(own) > self._max_batch or (
                max_rows is not None and num_rows > max_rows
            )
            if batch and (is_full or not keys.isdisjoint((*own, *job.dropped))):
                break
            keys |= own
            batch.append(queue.popleft())
        self._metrics.queued_sequences.dec(len(keys))
        return batch

    def _drop(self, keys: Collection[str]) -> None:
        """These have ended, in order. Chunks that wait are not computed: they would begin them
        anew, and nobody would end them again."""
        for key in keys:
            self._proposer.drop(key)
        if not keys:
            return
        waiting, self._chunks = self._chunks, deque()
        for job in waiting:
            if any(task.key in keys for task in job.tasks):
                self._metrics.queued_sequences.dec(len(job.tasks))
                lost = Computed((Resync(0),) * len(job.tasks), 0.0, 0.0)
                self._loop.call_soon_threadsafe(job.on_done, lost)
            else:
                self._chunks.append(job)

    def _compute(self, batch: Sequence[Job]) -> None:
        self._drop(dict.fromkeys(key for job in batch for key in job.dropped))
        tasks = [task for job in batch for task in job.tasks]
        began = time.monotonic()
        answers = iter(self._proposer.step(tasks) if tasks else ())
        compute_s = time.monotonic() - began
        computed = [
            (
                job,
                Computed(tuple(next(answers) for _ in job.tasks), began - job.queued_at, compute_s),
            )
            for job in batch
        ]
        for job, result in computed:
            if job.on_computed is not None:
                job.on_computed(result)
        self._loop.call_soon_threadsafe(self._deliver, computed)
