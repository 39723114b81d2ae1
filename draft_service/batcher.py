"""Steps of several decode workers and chunks of prompts, computed in one thread, in batches."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from draft_service.batch_metrics import BatchMetrics
from draft_service.compute_inbox import ComputeInbox
from kvbraid.speculative.proposal import Answer, DraftTask, Resync
from kvbraid.telemetry.speculation_metrics import DraftMetrics

# A stream whose last step is older does not keep others waiting.
_ACTIVE_S = 0.05


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

    dropped: forgotten before, with the chunks that wait. on_done: called once, in the compute
    thread; with None when the batcher was closed first.
    """

    tasks: Sequence[DraftTask]
    on_done: Callable[[Computed | None], object]
    stream: int | None = None
    dropped: Sequence[str] = ()
    queued_at: float = field(default_factory=time.monotonic)

    @property
    def num_rows(self) -> int:
        """Rows of all tasks."""
        return sum(len(task.next_token_ids) for task in self.tasks)


class Batcher:
    """Runs `proposer` in the thread that calls `run`, which also serves `inbox`; `submit`, `forget`
    and `close` are for any thread.

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
        self.inbox = ComputeInbox()
        self._proposer = proposer
        self._window_s = window_s
        self._max_batch = max_batch
        self._max_chunk_rows = max_chunk_rows
        self._metrics = BatchMetrics(metrics, proposer)
        self._counting = threading.Lock()
        self._num_queued = 0
        metrics.queued_sequences.set_function(self._num_waiting)
        self._is_closed = False
        # The compute thread's own.
        self._steps: deque[Job] = deque()
        self._chunks: deque[Job] = deque()
        self._last_step_at: dict[int, float] = {}
        self._is_chunk_turn = False

    # Any thread

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._count_queued(len(job.tasks))
        self.inbox.run(partial(self._file, job))

    def forget(self, stream: int) -> None:
        """A stream has ended: nobody waits for its steps."""
        self.inbox.run(partial(self._last_step_at.pop, stream, None))

    def close(self) -> None:
        """End `run` after the batch that it computes now; what waits is not computed."""
        self._is_closed = True
        self.inbox.run(lambda: None)

    def _count_queued(self, num: int) -> None:
        with self._counting:
            self._num_queued += num

    def _num_waiting(self) -> float:
        return self._num_queued + self.inbox.num_unread_sequences

    # Compute thread

    def run(self) -> None:
        """Compute until `close`."""
        self.inbox.begin()
        try:
            while not self._is_closed:
                self._compute(self._next_batch())
        finally:
            self._is_closed = True
            self.inbox.end()
            for job in (*self._steps, *self._chunks):
                self._refuse(job)

    def _next_batch(self) -> list[Job]:
        """The next jobs, no sequence twice; none once closed."""
        self.inbox.serve(0 if self._steps or self._chunks else None)
        if self._is_closed or not (self._steps or self._chunks):
            return []
        if self._chunks and (self._is_chunk_turn or not self._steps):
            self._is_chunk_turn = False
            return self._take(self._chunks, self._max_chunk_rows)
        self._await_other_streams()
        self._is_chunk_turn = True
        return self._take(self._steps, None)

    def _file(self, job: Job) -> None:
        if self._is_closed:
            self._refuse(job)
        elif job.stream is None:
            self._chunks.append(job)
        else:
            self._steps.append(job)
            self._last_step_at[job.stream] = job.queued_at

    def _refuse(self, job: Job) -> None:
        self._count_queued(-len(job.tasks))
        job.on_done(None)

    def _await_other_streams(self) -> None:
        if len(self._last_step_at) < 2:
            return
        now = time.monotonic()
        for stream, at in list(self._last_step_at.items()):
            if now - at > _ACTIVE_S:
                del self._last_step_at[stream]
        give_up = now + self._window_s
        while not self._is_closed and (left := give_up - time.monotonic()) > 0:
            here = {job.stream for job in self._steps}
            if here.issuperset(self._last_step_at):
                return
            self.inbox.serve(left)

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
        self._count_queued(-len(keys))
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
                self._count_queued(-len(job.tasks))
                job.on_done(Computed((Resync(0),) * len(job.tasks), 0.0, 0.0))
            else:
                self._chunks.append(job)

    def _compute(self, batch: Sequence[Job]) -> None:
        if not batch:
            return
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
            job.on_done(result)
        # Counted once the answers are on their way.
        self._metrics.observe(computed)
