"""The engine's drafter in another process: `Drafting` over one stream to a draft service.

drafting = RemoteDrafting(address=..., peer=..., settings=..., channels=..., metrics=...)
drafting.start()                            # I/O loop: connects in the background
answers = drafting.step(tasks)              # engine thread: one batched step, bounded in time
await drafting.stop()                       # I/O loop
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence

from kvbraid.settings import SpeculativeSettings, TlsSettings
from kvbraid.speculative.proposal import Answer, DraftTask, Proposal, Resync
from kvbraid.telemetry.speculation_metrics import SpeculationMetrics
from kvbraid.transport.draft_answers import AnsweredStep
from kvbraid.transport.draft_grant import DraftGrant
from kvbraid.transport.draft_stream import DraftStream, SentStep
from kvbraid.transport.draft_terms import DraftPeer
from kvbraid.transport.grant import new_transfer_id
from kvbraid.transport.grpc_push import ChannelFactory
from kvbraid.worker.circuit_breaker import CircuitBreaker
from kvbraid.worker.draft_checks import checked_answer, within_terms
from kvbraid.worker.draft_link import DraftLink
from kvbraid.worker.ended_sequences import EndedSequences
from kvbraid.worker.step_timeout import StepTimeout

logger = logging.getLogger(__name__)

# Ends of sequences are told with the next step; when none comes, after so long.
_DROP_DELAY_S = 0.05


class RemoteDrafting:
    """See `kvbraid.speculative.drafting.Drafting`. `start` and `stop` are the I/O loop's,
    everything else is the engine thread's.

    A step that goes wrong in whatever way is counted and decoded plainly. An answer that comes
    after its step is thrown away; until it has come, no other step is sent, so a slow service is
    never given more than it can do.
    """

    def __init__(
        self,
        *,
        address: str,
        peer: DraftPeer,
        settings: SpeculativeSettings,
        channels: ChannelFactory,
        tls: TlsSettings,
        metrics: SpeculationMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """peer: this worker; its max_draft_tokens is what `max_draft_tokens` says. channels: the
        channel to an address, which its owner closes after `stop`. tls: what they are made with.
        clock: seconds, monotonic."""
        self._address = address
        self._peer = peer
        self._metrics = metrics
        self._draft_seconds = metrics.step_seconds.labels(part="draft")
        self._wire_seconds = metrics.step_seconds.labels(part="wire")
        self._clock = clock
        self._breaker = CircuitBreaker(
            max_failures=settings.draft_max_failures,
            probe_s=settings.draft_probe_seconds,
            clock=clock,
        )
        self._timeout = StepTimeout(
            limit_s=settings.draft_timeout_ms / 1000,
            fraction=settings.draft_timeout_fraction,
            clock=clock,
        )
        self._probe_timeout_s = settings.draft_timeout_ms / 1000
        self._link = DraftLink(
            address=address,
            peer=peer,
            channels=channels,
            wire=settings.draft_wire,
            tls=tls,
            on_change=self._stream_changed,
        )
        self._stream: DraftStream | None = None
        self._last_step: SentStep | None = None
        # Epoch of the service that last took rows of a sequence.
        self._held_in: dict[str, int] = {}
        self._ended = EndedSequences()
        self._prober: asyncio.Task[None] | None = None

    # I/O loop

    def start(self) -> None:
        """Connect from the running loop, now and whenever the stream is lost."""
        self._link.start()
        self._prober = asyncio.get_running_loop().create_task(self._tend())

    async def stop(self) -> None:
        """Close the stream."""
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.wait({self._prober})
        await self._link.stop()

    # Engine thread

    @property
    def max_draft_tokens(self) -> int:
        """See Drafting."""
        return self._peer.max_draft_tokens

    @property
    def is_away(self) -> bool:
        """Whether a step would not be sent now. From any thread."""
        return self._stream is None or not self._breaker.is_closed

    def step(self, tasks: Sequence[DraftTask]) -> list[Answer | None]:
        """See Drafting."""
        if not tasks:
            return []
        timeout_s = self._timeout.begin_wait()
        try:
            return self._step(tasks, timeout_s)
        finally:
            self._timeout.end_wait()

    def take_rows(self) -> None:
        """See GrantingDrafting: the service takes them itself."""

    def await_rows(self, keys: Sequence[str]) -> Collection[str]:
        """See GrantingDrafting: the service waits for them itself."""
        return ()

    def drop(self, key: str) -> None:
        """See Drafting."""
        self._held_in.pop(key, None)
        self._ended.add(key)

    def open_grant(self, key: str, end_position: int) -> DraftGrant | None:
        """Permission for a prefill worker to push the rows [0, end_position) of the new sequence
        `key`; None while the service is away, and for more than its context."""
        stream = self._stream
        if stream is None or self.is_away or end_position > stream.terms.max_position:
            return None
        grant = DraftGrant(
            address=stream.terms.address or self._address,
            transfer_id=new_transfer_id(),
            incarnation=stream.terms.epoch,
            key=key,
            row_dtype=stream.terms.row_dtype,
            max_rows_per_message=stream.terms.max_rows_per_message,
        )
        stream.open_grant(key, grant.transfer_id, end_position)
        return grant

    def _step(self, tasks: Sequence[DraftTask], timeout_s: float) -> list[Answer | None]:
        stream = self._stream
        if stream is None or not self._breaker.is_closed:
            return self._plain(tasks, "unavailable")
        if self._last_step is not None and not self._last_step.wait(0):
            return self._failed(tasks, "timeout")
        parts = within_terms(tasks, stream.terms)
        sent = [part for part in parts if part is not None]
        num_rows = sum(len(part.next_token_ids) for part in sent)
        began = self._clock()
        step = self._last_step = self._ended.begin_step(stream, sent)
        self._metrics.unacknowledged_rows.set(num_rows)
        if not step.wait(timeout_s):
            return self._failed(tasks, "timeout")
        answered = step.answered
        if answered is None:
            return self._plain(tasks, "unavailable")
        self._breaker.record_success()
        wire_s = self._clock() - began - answered.compute_s
        self._draft_seconds.observe(answered.compute_s)
        self._wire_seconds.observe(max(0.0, wire_s))
        self._metrics.sent_rows_total.inc(num_rows)
        self._metrics.unacknowledged_rows.set(0)
        return self._answers(tasks, parts, answered, stream.terms.epoch)

    def _answers(
        self,
        tasks: Sequence[DraftTask],
        parts: Sequence[DraftTask | None],
        answered: AnsweredStep,
        epoch: int,
    ) -> list[Answer | None]:
        answers = iter(answered.answers)
        vocab_size = self._peer.vocab_size
        found: list[Answer | None] = []
        for task, part in zip(tasks, parts, strict=True):
            if part is None:
                self._count("no_room")
                found.append(None)
                continue
            given = next(answers)
            found.append(checked_answer(given, part, task, vocab_size, self._count))
            if isinstance(given, Proposal):
                self._held_in[task.key] = epoch
            elif isinstance(given, Resync):
                self._metrics.count_resync(self._why_resync(task.key, given, epoch))
        return found

    def _why_resync(self, key: str, resync: Resync, epoch: int) -> str:
        held_in = self._held_in.pop(key, None)
        if held_in is None or resync.num_rows > 0:
            return "gap"
        return "evicted" if held_in == epoch else "restarted"

    def _failed(self, tasks: Sequence[DraftTask], reason: str) -> list[Answer | None]:
        if self._breaker.record_failure():
            logger.warning("%s keeps failing and is left alone (%s)", self._address, reason)
        return self._plain(tasks, reason)

    def _plain(self, tasks: Sequence[DraftTask], reason: str) -> list[Answer | None]:
        self._count(reason, len(tasks))
        return [None] * len(tasks)

    def _count(self, reason: str, num: int = 1) -> None:
        self._metrics.count_fallback(reason, num)

    # I/O loop

    def _stream_changed(self, stream: DraftStream | None) -> None:
        self._stream = stream

    async def _tend(self) -> None:
        """Probe a service that is left alone; tell it of ended sequences while no step does."""
        while True:
            await asyncio.sleep(_DROP_DELAY_S)
            stream = self._stream
            if stream is None:
                continue
            if self._breaker.seconds_to_probe == 0:
                await self._probe(stream)
            elif self._ended.are_left() and self._breaker.is_closed and self._is_quiet():
                await self._exchange(stream)

    def _is_quiet(self) -> bool:
        return self._last_step is None or self._last_step.wait(0)

    async def _probe(self, stream: DraftStream) -> None:
        """An empty step takes the same way through the service as any other."""
        answered = await self._exchange(stream)
        self._breaker.record_probe(succeeded=answered is not None)
        if answered is not None:
            logger.info("%s answers again", self._address)

    async def _exchange(self, stream: DraftStream) -> AnsweredStep | None:
        """The answer to a step without tasks; None where none came in time."""
        step = self._ended.begin_step(stream, ())
        await asyncio.to_thread(step.wait, self._probe_timeout_s)
        return step.answered
