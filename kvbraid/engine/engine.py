"""Rank 0's engine thread: takes requests, plans steps, executes them with all ranks, tells what
happened. The other ranks run `follow` on the plans they receive."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvbraid.engine.events import (
    EngineEvent,
    GrantReady,
    PromptSent,
    RequestFailed,
    RowsReceived,
    StepReport,
    TokensReady,
)
from kvbraid.engine.kv_exchange import TransferProgress
from kvbraid.engine.news import News
from kvbraid.engine.rank_executor import RankExecutor, StepOutput
from kvbraid.engine.scheduler import Scheduler
from kvbraid.engine.sequence import EngineRequest, Sequence, SequenceKey, Status
from kvbraid.engine.speculation import PlainDecoding, Speculation
from kvbraid.engine.step_plan import StepPlan, Stop
from kvbraid.errors import KVBraidError, LeaseLostError
from kvbraid.request import DraftWindow, FinishReason, TokenChunk

# How long the engine sleeps when it has nothing to compute: short while rows are on their way
# (other ranks' progress is only seen by asking), long when idle (messages wake it).
_TRANSFER_POLL_S = 0.001
_IDLE_WAIT_S = 0.1


class PlanSender(Protocol):
    """Rank 0's end of the step channel."""

    @property
    def num_receivers(self) -> int:
        """Ranks that `send` reaches."""
        ...

    def send(self, plan: NDArray[np.int64]) -> None:
        """Give every other rank the next plan."""
        ...


class PlanReceiver(Protocol):
    """Another rank's end of the step channel."""

    def receive(self, idle: Callable[[], None]) -> NDArray[np.int64]:
        """The next plan; `idle` is called again and again while there is none."""
        ...


def follow(channel: PlanReceiver, executor: RankExecutor) -> None:
    """The loop of ranks above 0: execute every plan until one says stop."""

    def idle() -> None:
        executor.move_rows()

    while not executor.execute(StepPlan.decode(channel.receive(idle))).stopped:
        pass


class Engine:
    """Public methods may be called from any thread; everything else runs in `run`'s thread."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: RankExecutor,
        channel: PlanSender,
        on_event: Callable[[EngineEvent], None],
        on_step: Callable[[StepReport], None],
        speculation: Speculation | None = None,
        is_device_apart: bool = False,
    ) -> None:
        """is_device_apart: steps run on a device that the host does not compute for."""
        self._scheduler = scheduler
        self._executor = executor
        self._channel = channel
        self._news = News(on_event, on_step, may_wait=is_device_apart)
        self._speculation = speculation or PlainDecoding()
        executor.on_launched = self._meanwhile
        self._messages: deque[Callable[[], None]] = deque()
        self._awake = threading.Event()
        self._report_waiters: list[Callable[[NDArray[np.int64]], None]] = []
        self._confirm_waiters: list[Callable[[], None]] = []
        self._last_step_s = time.monotonic()
        self._is_asleep = True

    # -- from any thread ------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; a refusal comes back as RequestFailed."""
        self._post(lambda: self._submit(request))

    def start_received(self, key: SequenceKey, transfer_id: bytes, token_id: int) -> None:
        """The first token of a handed-off sequence; one that has its token keeps it.

        A transfer that is not the sequence's fails it with LeaseLostError; a key that is unknown
        has ended, and its last event was told.
        """
        self._post(lambda: self._start_received(key, transfer_id, token_id))

    def abort(self, key: SequenceKey, done: Callable[[bool], None]) -> None:
        """End a sequence, whose last event is an empty chunk with FinishReason.ABORT; `done(found)`
        is called once no rank writes its pages any more."""
        self._post(lambda: self._abort(key, done))

    def report_rows(self, done: Callable[[NDArray[np.int64]], None]) -> None:
        """Ask every rank for (finite rows, pool bytes): `done([tp_size, 2])`."""
        self._post(lambda: self._report_waiters.append(done))

    def stop(self) -> None:
        """End the engine threads of every rank after the current step."""
        self._post(self._stop)

    def wake(self) -> None:
        """Something arrived that the engine should look at now."""
        self._awake.set()

    @property
    def has_work(self) -> bool:
        """Whether requests or messages are queued or running."""
        return bool(self._messages or self._scheduler.num_running or self._scheduler.num_waiting)

    @property
    def step_age_s(self) -> float:
        """Seconds that the engine has been in its step; 0 while it sleeps for want of work."""
        return 0.0 if self._is_asleep else time.monotonic() - self._last_step_s

    # -- engine thread --------------------------------------------------------------------

    def run(self) -> None:
        """Steps until `stop`; returns after every rank was told."""
        self._note_step()
        stopped = False
        try:
            while not stopped:
                while self._messages:
                    self._messages.popleft()()
                plan = self._plan()
                if plan.is_empty:
                    self._wait()
                else:
                    stopped = self._step(plan)
        finally:
            self._news.flush()

    def _meanwhile(self) -> None:
        """The forward pass of a step is launched."""
        self._news.flush_due()
        self._speculation.meanwhile()

    def _post(self, message: Callable[[], None]) -> None:
        self._messages.append(message)
        self._awake.set()

    def _plan(self) -> StepPlan:
        self._speculation.draft(self._scheduler.active)
        plan = self._scheduler.schedule()
        collect = tuple(s.grant.transfer_id for s in self._scheduler.live if s.grant is not None)
        return replace(
            plan,
            collect=collect,
            report_rows=bool(self._report_waiters),
            confirm=bool(self._confirm_waiters),
            taps=self._wants_taps(plan),
        )

    def _wants_taps(self, plan: StepPlan) -> bool:
        speculation = self._speculation
        return speculation.wants_taps or (bool(plan.extends) and speculation.wants_prompt_taps)

    def _wait(self) -> None:
        self._news.flush()
        if not self._executor.move_rows():
            self._is_asleep = True
            self._awake.wait(_IDLE_WAIT_S)
        self._note_step()
        self._awake.clear()

    def _note_step(self) -> None:
        # In this order: whoever reads in between sees an engine that sleeps.
        self._last_step_s = time.monotonic()
        self._is_asleep = False

    def _step(self, plan: StepPlan) -> bool:
        began = time.monotonic()
        if self._channel.num_receivers > 0:
            self._channel.send(plan.encode())
        if plan.extends or not plan.has_compute:
            # Chunks are launched kernel by kernel, which takes long; without compute nothing is.
            self._news.flush()
        output = self._executor.execute(plan)
        self._announce_grants()
        num_drafts = {d.slot: len(d.drafts) for d in plan.decodes}
        self._speculation.verified(plan, output.tokens, time.monotonic() - began)
        taken = self._scheduler.commit(plan, output.tokens, output.invalid)
        for sequence, num_new in taken:
            self._deliver(sequence, num_new, num_drafts.get(sequence.slot, 0), output)
        for slot in output.invalid:
            self._fail(
                self._scheduler.in_slot(slot), KVBraidError("the model's logits are not finite")
            )
        if output.progress is not None:
            self._follow_transfers(plan, output.progress)
        self._answer_waiters(output)
        self._note_step()
        if plan.has_compute:
            self._report(plan, sum(num for _, num in taken), self._last_step_s - began)
            return output.stopped
        self._news.flush()
        if plan.collect and not self._messages:
            self._awake.wait(_TRANSFER_POLL_S)
            self._awake.clear()
        return output.stopped

    def _answer_waiters(self, output: StepOutput) -> None:
        if self._confirm_waiters:
            self._news.flush()
        confirmed, self._confirm_waiters = self._confirm_waiters, []
        for confirm in confirmed:
            confirm()
        if output.rows is not None:
            reported, self._report_waiters = self._report_waiters, []
            for report in reported:
                report(output.rows)

    def _announce_grants(self) -> None:
        """Tell of grants only after every rank has executed the plan that opened them."""
        for sequence in self._scheduler.active:
            if sequence.status is Status.RECEIVING and not sequence.is_granted:
                assert sequence.grant is not None
                sequence.is_granted = True
                cached = sequence.num_cached_tokens or 0
                grant = replace(sequence.grant, draft=self._speculation.open_grant(sequence))
                self._news.tell(GrantReady(sequence.request.key, grant, cached))
                self._news.flush()  # another worker waits for it

    def _deliver(
        self, sequence: Sequence, num_new: int, num_drafts: int, output: StepOutput
    ) -> None:
        reason = sequence.finish_reason(self._scheduler.limits.max_model_len)
        # Drafts behind a token that ends the sequence came true for nobody.
        window = DraftWindow(num_drafts, min(len(output.tokens[sequence.slot]) - 1, num_new))
        chunk = TokenChunk(
            token_ids=tuple(sequence.token_ids[-num_new:]),
            logprobs=output.logprobs.get(sequence.slot, ())[:num_new],
            finish_reason=reason,
            windows=(window,) if num_drafts else (),
        )
        if reason is not None:
            self._finish(sequence)
        elif sequence.request.destination is not None:
            sequence.status = Status.SENDING
        event = TokensReady(sequence.request.key, chunk, sequence.num_cached_tokens or 0)
        if reason is None and sequence.num_output_tokens > num_new:
            self._news.tell_tokens(event)
        else:
            self._news.tell(event)

    def _follow_transfers(self, plan: StepPlan, progress: NDArray[np.int64]) -> None:
        by_id = {s.grant.transfer_id: s for s in self._scheduler.live if s.grant is not None}
        for column, transfer_id in enumerate(plan.collect):
            sequence = by_id.get(transfer_id)
            if sequence is None:
                continue
            ranks = [TransferProgress(*row) for row in progress[:, column].tolist()]
            try:
                for rank in ranks:
                    rank.raise_for_failure()
            except KVBraidError as error:
                self._fail(sequence, error)
                continue
            if all(rank.is_complete for rank in ranks):
                self._complete_transfer(sequence, ranks)

    def _complete_transfer(self, sequence: Sequence, ranks: list[TransferProgress]) -> None:
        if sequence.status is Status.RECEIVING:
            if not sequence.has_all_rows:
                sequence.has_all_rows = True
                num_bytes = sum(rank.num_bytes for rank in ranks)
                seconds = time.monotonic() - (sequence.admitted_s or sequence.arrived_s)
                self._news.tell(RowsReceived(sequence.request.key, num_bytes, seconds))
            self._resume_if_ready(sequence)
        elif sequence.status is Status.SENDING:
            now = time.monotonic()
            admitted = sequence.admitted_s or now
            computed = sequence.computed_s or now
            self._finish(sequence)
            self._news.tell(
                PromptSent(
                    key=sequence.request.key,
                    num_bytes=sum(rank.num_bytes for rank in ranks),
                    num_rows=sum(rank.num_rows for rank in ranks),
                    queue_s=admitted - sequence.arrived_s,
                    compute_s=computed - admitted,
                    transfer_s=now - computed,
                )
            )

    def _resume_if_ready(self, sequence: Sequence) -> None:
        if sequence.has_all_rows and sequence.first_token_id is not None:
            self._scheduler.resume_received(sequence)

    def _submit(self, request: EngineRequest) -> None:
        try:
            self._scheduler.submit(request)
        except KVBraidError as error:
            self._news.tell(RequestFailed(request.key, error))
            return
        self._speculation.queued(request)

    def _start_received(self, key: SequenceKey, transfer_id: bytes, token_id: int) -> None:
        sequence = self._scheduler.find(key)
        if sequence is None or sequence.first_token_id is not None:
            return  # it has ended, or is told twice and may be decoding, its transfer long closed
        grant = sequence.grant
        if grant is None or grant.transfer_id != transfer_id:
            self._fail(sequence, LeaseLostError(f"{key} has no transfer {transfer_id.hex()}"))
            return
        sequence.first_token_id = token_id
        self._resume_if_ready(sequence)

    def _abort(self, key: SequenceKey, done: Callable[[bool], None]) -> None:
        sequence = self._scheduler.find(key)
        if sequence is not None:
            self._scheduler.wasted_tokens["aborted"] += sequence.num_computed_tokens
            self._finish(sequence)
            cached = sequence.num_cached_tokens or 0
            aborted = TokenChunk((), (), FinishReason.ABORT)
            self._news.tell(TokensReady(key, aborted, cached))
        # The release travels in the next plan; answering after it means that no rank can write.
        self._confirm_waiters.append(lambda: done(sequence is not None))

    def _fail(self, sequence: Sequence, error: KVBraidError) -> None:
        self._scheduler.wasted_tokens["failed"] += sequence.num_computed_tokens
        self._finish(sequence)
        self._news.tell(RequestFailed(sequence.request.key, error))

    def _finish(self, sequence: Sequence) -> None:
        self._scheduler.finish(sequence)
        self._speculation.drop(sequence)

    def _stop(self) -> None:
        for sequence in self._scheduler.live:
            self._scheduler.finish(sequence)
        self._scheduler.operate(Stop())

    def _report(self, plan: StepPlan, num_sampled: int, seconds: float) -> None:
        scheduler = self._scheduler
        waits, scheduler.queue_waits_s = tuple(scheduler.queue_waits_s), []
        self._news.report(
            StepReport(
                seconds=seconds,
                num_decodes=len(plan.decodes),
                num_extend_tokens=sum(e.length for e in plan.extends),
                num_sampled=num_sampled,
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_waiting_tokens=scheduler.num_waiting_tokens,
                queue_waits_s=waits,
                num_preemptions=scheduler.num_preemptions,
                wasted_tokens=dict(scheduler.wasted_tokens),
                num_prefix_queried=scheduler.pages.num_prefix_queried,
                num_prefix_hit=scheduler.pages.num_prefix_hit,
                num_evicted_pages=scheduler.cache.num_evicted_pages,
            )
        )
