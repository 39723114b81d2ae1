"""What the draft service does with the messages of its peers, whatever wire brought them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draft_service.batcher import Batcher, Computed, Job
from draft_service.config import DraftSettings
from draft_service.sessions import Session, Sessions
from kvbraid.errors import IncompatibleError, InvalidRequestError, LeaseLostError, UnavailableError
from kvbraid.speculative.proposal import Answer, DraftTask, Resync
from kvbraid.telemetry.speculation_metrics import DraftMetrics
from kvbraid.transport.draft_answers import AnsweredStep, Refused, WireAnswer
from kvbraid.transport.draft_terms import DraftPeer, DraftTerms, misfits
from kvbraid.worker.ingest_grants import IngestGrants
from kvbraid.worker.prompt_intake import PromptIntake

SendAnswer = Callable[[AnsweredStep], None]


@dataclass(frozen=True, slots=True)
class Step:
    """A decode worker's step, checked against the terms.

    tasks, dropped: by the proposer's names. refused: indices of tasks whose rows are not finite.
    """

    epoch: int
    step_id: int
    tasks: Sequence[DraftTask]
    dropped: Sequence[str]
    refused: frozenset[int] = frozenset()


class DraftWorker:
    """Sessions, grants and the batcher; used in the event loop.

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
        self._settling: set[asyncio.Task[None]] = set()
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
        session = self._sessions.attach(peer.incarnation, owner)
        self._end_lease(session)
        self._metrics.connected_workers.set(self._sessions.num_attached)
        return session

    def detach(self, session: Session, owner: object) -> None:
        """The stream has ended; its sequences stay for as long as a lease, for the next one."""
        if self._sessions.detach(session, owner):
            self._leases[session.number] = asyncio.get_running_loop().call_later(
                self._settings.lease_seconds, self._sessions.forget, session
            )
        self._batcher.forget(session.number)
        self._metrics.connected_workers.set(self._sessions.num_attached)

    def open(self, session: Session, key: str, transfer_id: bytes, end_position: int) -> None:
        """A prefill worker will push rows. Raises InvalidRequestError for a malformed grant."""
        if not 0 <= end_position <= self.terms.max_position:
            raise InvalidRequestError(
                f"end_position is {end_position}, accepted: up to {self.terms.max_position}",
                field="end_position",
            )
        own_key = session.own_key(key)
        self._grants.open(own_key, transfer_id, end_position)
        # Its rows may come, and the worker go before a step.
        if forgotten := session.touch([own_key]):
            self._drop(session, forgotten)

    def begin_step(
        self, session: Session, step: Step, answer: SendAnswer | None = None
    ) -> asyncio.Future[AnsweredStep]:
        """Commit, ingest and propose; a repeated step gets the answer that it got before.

        answer: called with the answer to a new step in the compute thread, before the future that
        is returned has it. Raises LeaseLostError for another epoch, InvalidRequestError for a step
        that is too old.
        """
        if step.epoch != self.terms.epoch:
            raise LeaseLostError(f"epoch {step.epoch} is over, this is {self.terms.epoch}")
        known = session.answer_to(step.step_id)
        if known is not None:
            return asyncio.shield(known)
        promise = _Promise(session.begin(step.step_id), answer)
        tasks, ended = self._own_tasks(session, step)
        job = Job(tasks, lambda _: None, stream=session.number, dropped=ended)
        job.on_computed = lambda computed: promise.answer(self._answered(step, computed))
        job.on_done = promise.settle
        if not self._grants.concern(tasks):
            self._batcher.submit(job)
        else:
            settling = asyncio.get_running_loop().create_task(self._submit_settled(job, promise))
            self._settling.add(settling)
            settling.add_done_callback(self._settling.discard)
        return promise.own

    async def _take_chunk(self, chunk: DraftTask) -> Answer:
        done: asyncio.Future[Computed | None] = asyncio.get_running_loop().create_future()

        def on_done(computed: Computed | None) -> None:
            if not done.done():
                done.set_result(computed)

        self._batcher.submit(Job([chunk], on_done))
        computed = await done
        if computed is None:
            raise _ended()
        return computed.answers[0]

    def _own_tasks(self, session: Session, step: Step) -> tuple[Sequence[DraftTask], list[str]]:
        """The tasks of a step that can be computed, and the names that end with it."""
        ended = list(step.dropped)
        for key in ended:
            self._grants.close(key)
        session.forget(ended)
        own = step.tasks
        if step.refused:
            own = [task for index, task in enumerate(own) if index not in step.refused]
        ended += session.touch(task.key for task in own)
        return own, ended

    async def _submit_settled(self, job: Job, promise: _Promise) -> None:
        try:
            job.tasks = await self._grants.settle(job.tasks, self._settings.ingest_wait_ms / 1000)
        except asyncio.CancelledError:  # whoever repeats the step must not wait for ever
            promise.give_up("the step was given up")
            raise
        self._batcher.submit(job)

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

    def _forget_session(self, session: Session) -> None:
        self._end_lease(session)
        self._drop(session, session.keys)
        self._batcher.forget(session.number)

    def _drop(self, session: Session, keys: Sequence[str]) -> None:
        for key in keys:
            self._grants.close(key)
        self._batcher.submit(Job((), lambda _: None, stream=session.number, dropped=keys))


class _Promise:
    """The answer to a step, twice: for those who repeat it, and `own` for the call that brought
    it, which may be cancelled. A shield would do the same in more turns of the loop.

    send: called with the answer, in the compute thread.
    """

    def __init__(self, kept: asyncio.Future[AnsweredStep], send: SendAnswer | None) -> None:
        self.own: asyncio.Future[AnsweredStep] = asyncio.get_running_loop().create_future()
        self._both = (self.own, kept)
        self._send = send
        self._answered: AnsweredStep | None = None

    def answer(self, answered: AnsweredStep) -> None:
        """Here it is. Compute thread."""
        self._answered = answered
        if self._send is not None:
            self._send(answered)

    def settle(self, computed: Computed | None) -> None:
        """Pass on what `answer` got. Event loop."""
        if computed is None or self._answered is None:
            self.give_up(str(_ended()))
            return
        for future in self._both:
            if not future.done():
                future.set_result(self._answered)

    def give_up(self, why: str) -> None:
        """There will be none."""
        for future in self._both:
            if not future.done():
                future.set_exception(UnavailableError(why))
                future.exception()  # nobody may be there to ask


def _ended() -> UnavailableError:
    return UnavailableError("this draft service has ended")
