"""What the draft service does with the messages of its peers, whatever wire brought them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from draft_service.batcher import Batcher, Computed, Job
from draft_service.config import DraftSettings
from draft_service.sessions import Session, Sessions
from draft_service.step_answer import OnOutcome, StepAnswer
from kvbraid.errors import IncompatibleError, InvalidRequestError, LeaseLostError, UnavailableError
from kvbraid.speculative.proposal import Answer, DraftTask, Resync
from kvbraid.telemetry.speculation_metrics import DraftMetrics
from kvbraid.transport.draft_answers import AnsweredStep, Refused, WireAnswer
from kvbraid.transport.draft_terms import DraftPeer, DraftTerms, misfits
from kvbraid.worker.ingest_grants import IngestGrants
from kvbraid.worker.prompt_intake import PromptIntake


@dataclass(frozen=True, slots=True)
class Step:
    """A decode worker's step, checked against the terms.

    tasks, dropped: by the proposer's names. refused: indices of tasks whose rows are not finite.
    arrived_at: on time.monotonic's clock; a step that came while others were computed may have come
    later.
    """

    epoch: int
    step_id: int
    tasks: Sequence[DraftTask]
    dropped: Sequence[str]
    refused: frozenset[int]
    arrived_at: float


class DraftWorker:
    """Sessions, grants and the batcher.

    Steps come from the event loop and from the compute thread. What both touch is the sessions, and
    `_sessions_lock` is held whenever one of them is. Grants are the event loop's own: a step that
    concerns one goes there. Everything but `begin_step` is for the event loop.

    terms: what peers are told. metrics: of the service. intake: takes the rows of prompts.
    """

    def __init__(
        self,
        *,
        terms: DraftTerms,
        settings: DraftSettings,
        batcher: Batcher,
        metrics: DraftMetrics,
    ) -> None:
        self.terms = terms
        self._settings = settings
        self._batcher = batcher
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._settling: set[asyncio.Task[None]] = set()
        self._sessions_lock = threading.Lock()
        # Of sessions without a stream, by number.
        self._leases: dict[int, asyncio.TimerHandle] = {}
        self._sessions = Sessions(
            max_sessions=settings.max_workers,
            # Ended sequences are told late at worst; the proposer forgets the rest by itself.
            max_keys=4 * settings.max_sequences,
            on_forget=self._forget_session,
        )
        self._grants = IngestGrants(
            max_grants=4 * settings.max_sequences, lease_s=settings.lease_seconds
        )
        self.intake = PromptIntake(
            terms=terms,
            grants=self._grants,
            open_wait_s=settings.open_wait_ms / 1000,
            compute=self._take_chunk,
        )

    def attach(self, peer: DraftPeer, owner: object) -> Session:
        """Serve a decode worker on the stream `owner`. Raises IncompatibleError with every reason
        why that cannot be, OverloadedError when there are too many."""
        if reasons := misfits(peer, self.terms):
            raise IncompatibleError("; ".join(reasons))
        with self._sessions_lock:
            session = self._sessions.attach(peer.incarnation, owner)
            self._metrics.connected_workers.set(self._sessions.num_attached)
        self._end_lease(session)
        return session

    def detach(self, session: Session, owner: object) -> None:
        """The stream has ended; its sequences stay for as long as a lease, for the next one."""
        with self._sessions_lock:
            is_left = self._sessions.detach(session, owner)
            self._metrics.connected_workers.set(self._sessions.num_attached)
        if is_left:
            self._leases[session.number] = self._loop.call_later(
                self._settings.lease_seconds, self._end_session, session
            )
        self._batcher.forget(session.number)

    def open(
        self, session: Session, owner: object, key: str, transfer_id: bytes, end_position: int
    ) -> None:
        """A prefill worker will push rows. Raises InvalidRequestError for a malformed grant,
        LeaseLostError when another stream than `owner` speaks for the worker."""
        if not 0 <= end_position <= self.terms.max_position:
            raise InvalidRequestError(
                f"end_position is {end_position}, accepted: up to {self.terms.max_position}",
                field="end_position",
            )
        own_key = session.own_key(key)
        with self._sessions_lock:
            session.require_owner(owner)
            self._grants.open(own_key, transfer_id, end_position)
            # Its rows may come, and the worker go before a step.
            forgotten = session.touch([own_key])
        if forgotten:
            self._drop(session, forgotten)

    def begin_step(
        self, session: Session, owner: object, step: Step, on_outcome: OnOutcome
    ) -> None:
        """Commit, ingest and propose; a repeated step gets the answer that it got before. From the
        event loop and from the compute thread.

        on_outcome: called once, with the answer or why there is none: the answer to a new step in
        the compute thread, any other one in any thread. Raises LeaseLostError for another epoch
        and when another stream than `owner` speaks for the worker, InvalidRequestError for a step
        that is too old.
        """
        if step.epoch != self.terms.epoch:
            raise LeaseLostError(f"epoch {step.epoch} is over, this is {self.terms.epoch}")
        with self._sessions_lock:
            session.require_owner(owner)
            known = session.answer_to(step.step_id)
            if known is None:
                answer = session.begin(step.step_id)
                tasks, ended = _own_tasks(session, step)
        if known is not None:
            known.then(on_outcome)
            return
        answer.then(on_outcome)
        job = Job(
            tasks,
            partial(self._settle, step, answer),
            stream=session.number,
            dropped=ended,
            queued_at=step.arrived_at,
        )
        keys = [*step.dropped, *(task.key for task in tasks)]
        if self._grants.concern(keys):
            self._loop.call_soon_threadsafe(self._begin_settling, job, step.dropped, answer)
        else:
            self._batcher.submit(job)

    async def _take_chunk(self, chunk: DraftTask) -> Answer:
        done: asyncio.Future[Computed | None] = self._loop.create_future()

        def take(computed: Computed | None) -> None:
            if not done.done():
                done.set_result(computed)

        in_loop = self._loop.call_soon_threadsafe
        self._batcher.submit(Job([chunk], lambda computed: in_loop(take, computed)))
        computed = await done
        if computed is None:
            raise _ended()
        return computed.answers[0]

    def _begin_settling(self, job: Job, dropped: Sequence[str], answer: StepAnswer) -> None:
        for key in dropped:
            self._grants.close(key)
        settling = self._loop.create_task(self._submit_settled(job, answer))
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)

    async def _submit_settled(self, job: Job, answer: StepAnswer) -> None:
        try:
            job.tasks = await self._grants.settle(job.tasks, self._settings.ingest_wait_ms / 1000)
        except asyncio.CancelledError:  # whoever repeats the step must not wait for ever
            answer.settle(UnavailableError("the step was given up"))
            raise
        self._batcher.submit(job)

    def _settle(self, step: Step, answer: StepAnswer, computed: Computed | None) -> None:
        answer.settle(_ended() if computed is None else self._answered(step, computed))

    def _answered(self, step: Step, computed: Computed) -> AnsweredStep:
        given = iter(computed.answers)
        answers: list[WireAnswer] = [
            Refused() if index in step.refused else next(given) for index in range(len(step.tasks))
        ]
        for answer in answers:
            if isinstance(answer, Resync):
                self._metrics.count_resync("gap" if answer.num_rows else "evicted")
        return AnsweredStep(step.step_id, tuple(answers), computed.queue_s, computed.compute_s)

    def _end_lease(self, session: Session) -> None:
        if (lease := self._leases.pop(session.number, None)) is not None:
            lease.cancel()

    def _end_session(self, session: Session) -> None:
        with self._sessions_lock:
            self._sessions.forget(session)

    def _forget_session(self, session: Session) -> None:
        """Called with the lock."""
        self._end_lease(session)
        self._drop(session, session.keys)
        self._batcher.forget(session.number)

    def _drop(self, session: Session, keys: Sequence[str]) -> None:
        for key in keys:
            self._grants.close(key)
        self._batcher.submit(Job((), lambda _: None, stream=session.number, dropped=keys))


def _own_tasks(session: Session, step: Step) -> tuple[Sequence[DraftTask], list[str]]:
    """The tasks of a step that can be computed, and the names that end with it."""
    ended = list(step.dropped)
    session.forget(ended)
    own = step.tasks
    if step.refused:
        own = [task for index, task in enumerate(own) if index not in step.refused]
    ended += session.touch(task.key for task in own)
    return own, ended


def _ended() -> UnavailableError:
    return UnavailableError("this draft service has ended")
