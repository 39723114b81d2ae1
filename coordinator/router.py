"""Picks the workers of a request: the decode worker first, then a prefill worker if worthwhile."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from coordinator.config import RoutingSettings
from coordinator.prefix_index import PrefixIndex
from coordinator.registry import Pool, Registry, Worker
from kvbraid.errors import OverloadedError, UnavailableError
from kvbraid.kv.prefix_cache import block_hashes
from kvbraid.request import GenerateRequest
from kvbraid.telemetry.metrics import CoordinatorMetrics

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
# Handoffs of one request that may break before its prompt is computed where it is needed.
_MAX_BROKEN_HANDOFFS = 2

Handoff = tuple[Worker, Worker]
"""A prefill worker and the decode worker that it pushes rows to."""


@dataclass(slots=True, eq=False)
class Placement:
    """The chosen workers and what is reserved on them until `release`.

    prefill None: the decode worker computes the prompt itself.
    """

    decode: Worker
    prefill: Worker | None
    num_decode_tokens: int
    num_prefill_tokens: int
    _is_prefilling: bool = False
    _is_reserved: bool = False

    def reserve(self) -> None:
        """Counts the request on its workers."""
        self._is_reserved = True
        self.decode.num_in_flight += 1
        self.decode.num_reserved_tokens += self.num_decode_tokens
        if self.prefill is not None:
            self._is_prefilling = True
            self.prefill.num_in_flight += 1
            self.prefill.num_reserved_tokens += self.num_prefill_tokens

    def prefill_is_done(self) -> None:
        """The prompt is computed: the prefill worker is free of it. Idempotent."""
        if self._is_prefilling and self.prefill is not None:
            self._is_prefilling = False
            self.prefill.num_in_flight -= 1
            self.prefill.num_reserved_tokens -= self.num_prefill_tokens

    def release(self) -> None:
        """Gives everything back. Idempotent."""
        self.prefill_is_done()
        if self._is_reserved:
            self._is_reserved = False
            self.decode.num_in_flight -= 1
            self.decode.num_reserved_tokens -= self.num_decode_tokens


class Router:
    """Spreads requests by room, queue and where their prefix was sent before."""

    def __init__(
        self, registry: Registry, settings: RoutingSettings, metrics: CoordinatorMetrics
    ) -> None:
        self._registry = registry
        self._settings = settings
        self._metrics = metrics
        self._index = PrefixIndex(settings.prefix_index_blocks)
        self._said: set[str] = set()

    def num_places(self) -> int:
        """Completions that could run or wait on the decode workers if there were no others, those
        that are away for a moment included."""
        workers = self._registry.workers(Pool.DECODE)
        known = [worker for worker in workers if worker.info is not None and worker.is_compatible]
        return sum(self._num_places_of(worker) for worker in known)

    def place(
        self,
        request: GenerateRequest,
        emitted: Sequence[int],
        avoid: Collection[Worker] = (),
        broken_handoffs: Collection[Handoff] = (),
    ) -> Placement:
        """Workers for prompt + emitted tokens; the caller releases the placement.

        Workers in `avoid` failed this request before and are taken only when there is no other.
        `broken_handoffs` of it are not tried again: when no other way is left, or two were tried,
        the decode worker computes the prompt if that is allowed. Raises UnavailableError without a
        worker that could hold the request, OverloadedError when all are full.
        """
        token_ids = request.prompt_ids + tuple(emitted)
        max_tokens = request.sampling.max_tokens or 0
        num_total = len(request.prompt_ids) + max_tokens
        decode_workers = self._candidates(Pool.DECODE, avoid)
        digest = next((w.info.model_digest for w in decode_workers if w.info), "")
        hashes = block_hashes(token_ids, model_digest=digest, cache_salt=request.cache_salt)
        decode = self._pick_decode(decode_workers, hashes, num_total)
        num_known = min(self._index.num_cached_tokens(hashes, decode.identity), len(token_ids) - 1)
        prefill = None
        if len(token_ids) - num_known > self._settings.local_prefill_max_tokens:
            senders = self._senders(decode, avoid, broken_handoffs, len(token_ids))
            prefill = self._pick_prefill(senders, hashes)
        for worker in (decode, prefill):
            if worker is not None:
                self._index.note(hashes, worker.identity)
        path = "local" if prefill is None else "handoff"
        self._metrics.placement.placements_total.labels(path=path).inc()
        placement = Placement(decode, prefill, num_total, len(token_ids))
        placement.reserve()
        return placement

    def _candidates(self, pool: Pool, avoid: Collection[Worker]) -> list[Worker]:
        up = self._registry.up(pool)
        return [worker for worker in up if worker not in avoid] or up

    def _pick_decode(
        self, workers: list[Worker], hashes: Sequence[bytes], num_total: int
    ) -> Worker:
        if not workers:
            raise UnavailableError(self._registry.why_none_is_up(Pool.DECODE))
        large = [worker for worker in workers if worker.max_sequence_len >= num_total]
        if not large:
            raise UnavailableError(
                f"none of {len(workers)} decode workers that are up can hold {num_total} tokens"
            )
        free = [worker for worker in large if self._has_queue_room(worker)]
        if not free:
            raise OverloadedError(
                f"all {len(large)} decode workers have {self._settings.max_queued_requests} or "
                "more requests waiting",
                retry_after_s=_RETRY_AFTER_S,
            )
        cached = self._best_cached(free, hashes)
        if cached is not None and _room(cached) >= num_total:
            return cached
        return max(free, key=lambda worker: (_room(worker), -worker.num_in_flight))

    def _has_queue_room(self, worker: Worker) -> bool:
        return worker.num_in_flight < self._num_places_of(worker)

    def _num_places_of(self, worker: Worker) -> int:
        slots = worker.info.max_num_seqs if worker.info else 0
        return slots + self._settings.max_queued_requests

    def _best_cached(self, workers: list[Worker], hashes: Sequence[bytes]) -> Worker | None:
        """The worker with the longest known prefix, unless it is busier than its share."""
        share = (1 + sum(worker.num_in_flight for worker in workers)) / len(workers)
        bound = math.ceil(share * self._settings.affinity_load_factor)
        scored = [
            (self._index.num_cached_tokens(hashes, worker.identity), -worker.num_in_flight, worker)
            for worker in workers
            if worker.num_in_flight < bound
        ]
        num_tokens, _, best = max(scored, key=lambda entry: entry[:2], default=(0, 0, None))
        return best if num_tokens else None

    def _senders(
        self,
        decode: Worker,
        avoid: Collection[Worker],
        broken_handoffs: Collection[Handoff],
        num_tokens: int,
    ) -> list[Worker]:
        """Prefill workers that may hand the prompt to `decode`; none: it computes it itself."""
        if not self._registry.is_configured(Pool.PREFILL):
            return []
        workers = [
            worker
            for worker in self._candidates(Pool.PREFILL, avoid)
            if worker.max_sequence_len > num_tokens
        ]
        if not workers:
            self._fall_back("no_prefill_worker", "no prefill worker is up")
        if not workers or not broken_handoffs or not self._settings.prefill_fallback:
            return workers
        is_enough = len(broken_handoffs) >= _MAX_BROKEN_HANDOFFS
        unbroken = [w for w in workers if not is_enough and (w, decode) not in broken_handoffs]
        if not unbroken:
            self._fall_back("handoffs_failed", "prompts do not get to decode workers")
        return unbroken

    def _pick_prefill(self, workers: list[Worker], hashes: Sequence[bytes]) -> Worker | None:
        if not workers:
            return None
        return self._best_cached(workers, hashes) or min(workers, key=_queued_tokens)

    def _fall_back(self, reason: str, why: str) -> None:
        if not self._settings.prefill_fallback:
            raise UnavailableError(why)
        self._metrics.process.fallbacks_total.labels(reason=reason).inc()
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("%s: decode workers compute prompts themselves", why)


def _room(worker: Worker) -> int:
    """Tokens that it can still take: what it says is used, or what was promised if that is more."""
    if worker.info is None:
        return 0
    used = worker.info.num_pool_tokens - worker.info.num_free_tokens
    return worker.info.num_pool_tokens - max(used, worker.num_reserved_tokens)


def _queued_tokens(worker: Worker) -> tuple[int, int]:
    """Prompt tokens before a new one, then requests in flight."""
    said = worker.info.num_queued_prompt_tokens if worker.info else 0
    return max(said, worker.num_reserved_tokens), worker.num_in_flight
