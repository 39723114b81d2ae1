"""What the servicers of a worker use on rank 0: the engine's streams and the worker's limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvbraid.engine.engine import Engine
from kvbraid.engine.events import PromptSent, RowsReceived, StepReport
from kvbraid.engine.scheduler import Scheduler
from kvbraid.errors import InvalidRequestError, KVBraidError
from kvbraid.kv.kv_layout import KvLayout, ranks_heads
from kvbraid.request import SamplingParams
from kvbraid.telemetry.labels import WASTE_REASONS
from kvbraid.telemetry.metrics import WorkerMetrics
from kvbraid.transport.grants import Grant
from kvbraid.transport.mover import MoverChoice, movers_used
from kvbraid.transport.staging import host_id
from kvbraid.validation import check_token_ids, validate_sampling
from kvbraid.worker.request_streams import RequestStreams

# Steps between two refreshes of gauges that cost more than a counter.
_GAUGE_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Facts of a worker that never change while it runs."""

    role: str
    incarnation: int
    model_name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    num_pool_tokens: int
    max_num_seqs: int
    attention_backend: str
    exchange: str
    q_mode: str
    communicator: str
    mover: MoverChoice


class Worker:
    """Rank 0's view of a running worker, used in the event loop."""

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        layout: KvLayout,
        engine: Engine,
        scheduler: Scheduler,
        streams: RequestStreams,
        metrics: WorkerMetrics,
    ) -> None:
        self.identity = identity
        self.layout = layout
        self.streams = streams
        self.metrics = metrics
        self._engine = engine
        self._scheduler = scheduler
        self._host_id = host_id()
        streams.on_cancel_to_free = metrics.engine.cancel_to_free_seconds.observe

    def sampling_for(
        self, sampling: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> SamplingParams:
        """Sampling parameters as the engine takes them: checked, with the model's own end tokens
        and a token limit.

        Raises InvalidRequestError naming the field and what is accepted.
        """
        identity = self.identity
        check_token_ids(token_ids, identity.vocab_size)
        if not 1 <= num_prompt_tokens <= len(token_ids):
            raise InvalidRequestError(
                f"num_prompt_tokens {num_prompt_tokens}: accepted 1 to {len(token_ids)}",
                field="num_prompt_tokens",
            )
        validate_sampling(sampling, vocab_size=identity.vocab_size)
        if sampling.seed is None:
            raise InvalidRequestError("seed must be set by the coordinator", field="seed")
        room = identity.max_model_len - len(token_ids)
        if room < 1:
            raise InvalidRequestError(
                f"{len(token_ids)} tokens leave no room in a context of "
                f"{identity.max_model_len} tokens",
                field="token_ids",
            )
        own = () if sampling.ignore_eos else identity.eos_token_ids
        return replace(
            sampling,
            stop=(),
            n=1,
            stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *own))),
            max_tokens=min(room, sampling.max_tokens or room),
        )

    def check_token_id(self, token_id: int) -> None:
        """Raises InvalidRequestError unless the id is in the vocabulary."""
        check_token_ids((token_id,), self.identity.vocab_size)

    def observe_sent(self, sent: PromptSent, grant: Grant) -> None:
        """Count a handoff that left."""
        layout = f"{_shape(self.layout)}-{_shape(grant.layout)}"
        mover = movers_used(self.identity.mover, grant.endpoints, self._host_id)
        self._observe_handoff("out", mover, layout, sent.num_bytes, sent.transfer_s)

    def observe_received(self, received: RowsReceived) -> None:
        """Count a handoff that arrived; who sent it does not matter to this side."""
        layout = f"any-{_shape(self.layout)}"
        mover = self.identity.mover
        self._observe_handoff("in", mover, layout, received.num_bytes, received.seconds)

    @contextmanager
    def counted_handoff_failures(self, direction: str) -> Iterator[None]:
        """Count the errors of the block as failed handoffs. direction: "in" or "out"."""
        try:
            yield
        except KVBraidError as error:
            self.metrics.handoff.failures_total.labels(
                direction=direction, reason=error.reason
            ).inc()
            raise

    def _observe_handoff(
        self, direction: str, mover: str, layout: str, num_bytes: int, seconds: float
    ) -> None:
        handoff = self.metrics.handoff
        labels = {"direction": direction, "mover": mover}
        handoff.bytes_total.labels(**labels).inc(num_bytes)
        handoff.duration_seconds.labels(**labels, layout=layout).observe(seconds)

    def _pool_bytes(self, rank: int) -> int:
        layout = self.layout
        rows = self.identity.num_pool_tokens // layout.dcp_size + layout.page_size
        return rows * layout.num_layers * len(ranks_heads(layout, rank)) * layout.row_bytes

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for room."""
        return self._scheduler.num_waiting

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens not computed yet."""
        return self._scheduler.num_waiting_tokens

    @property
    def step_age_s(self) -> float:
        """Seconds that the engine has been in its step; 0 while it sleeps for want of work."""
        return self._engine.step_age_s

    def pages_by_state(self) -> dict[str, int]:
        """Logical pages: free, active, leased (their rows are on the way), cached."""
        counts = self._scheduler.cache.counts()
        leased = min(counts.active, self._scheduler.num_leased_pages)
        return {
            "free": counts.free,
            "active": counts.active - leased,
            "leased": leased,
            "cached": counts.cached,
        }

    async def refresh_gauges(self) -> None:
        """Keep gauges current until cancelled, also while the engine is idle or stuck."""
        engine, kv = self.metrics.engine, self.metrics.kv
        kv.pool_tokens.set(self.identity.num_pool_tokens)
        engine.max_running_sequences.set(self.identity.max_num_seqs)
        engine.max_waiting_sequences.set(self._scheduler.limits.max_num_waiting)
        for rank in range(self.layout.tp_size):
            kv.pool_bytes.labels(rank=rank).set(self._pool_bytes(rank))
        while True:
            engine.running_sequences.set(self.num_running)
            engine.waiting_sequences.set(self.num_waiting)
            engine.waiting_prompt_tokens.set(self.num_queued_tokens)
            engine.step_age_seconds.set(self.step_age_s)
            for state, count in self.pages_by_state().items():
                kv.pages.labels(state=state).set(count)
            for direction, count in self._scheduler.open_transfers().items():
                self.metrics.handoff.open_leases.labels(direction=direction).set(count)
            await asyncio.sleep(_GAUGE_INTERVAL_S)


class StepObserver:
    """Counts steps; called in the engine thread."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._engine = metrics.engine
        self._kv = metrics.kv
        self._totals: tuple[int, ...] = (0,) * (4 + len(WASTE_REASONS))

    def __call__(self, report: StepReport) -> None:
        """One step."""
        engine = self._engine
        kinds = (report.num_decodes > 0, report.num_extend_tokens > 0)
        kind = {(True, False): "decode", (False, True): "extend"}.get(kinds, "mixed")
        engine.step_seconds.labels(kind=kind).observe(report.seconds)
        engine.step_sequences.observe(report.num_running)
        engine.step_tokens.observe(report.num_decodes + report.num_extend_tokens)
        engine.prompt_tokens_total.inc(report.num_extend_tokens)
        engine.generated_tokens_total.inc(report.num_sampled)
        for wait_s in report.queue_waits_s:
            engine.queue_seconds.observe(wait_s)
        totals = (
            (engine.preemptions_total, report.num_preemptions),
            *(
                (engine.wasted_tokens_total.labels(reason=reason), report.wasted_tokens[reason])
                for reason in WASTE_REASONS
            ),
            (self._kv.prefix_query_tokens_total, report.num_prefix_queried),
            (self._kv.prefix_hit_tokens_total, report.num_prefix_hit),
            (self._kv.evicted_pages_total, report.num_evicted_pages),
        )
        for (counter, total), before in zip(totals, self._totals, strict=True):
            counter.inc(total - before)
        self._totals = tuple(total for _, total in totals)


def _shape(layout: KvLayout) -> str:
    return f"tp{layout.tp_size}dcp{layout.dcp_size}"
