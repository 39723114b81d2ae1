"""What a draft service's metrics say of its batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbraid.speculative.proposal import Proposal, Resync
from kvbraid.telemetry.speculation_metrics import DraftMetrics

if TYPE_CHECKING:
    from draft_service.batcher import Computed, Job, Proposes


class BatchMetrics:
    """Counts what was computed and what `proposer` holds; used by the compute thread."""

    def __init__(self, metrics: DraftMetrics, proposer: Proposes) -> None:
        self._metrics = metrics
        self._proposer = proposer
        self._num_pool_tokens = proposer.num_free_tokens
        self._num_evicted = 0

    def observe(self, computed: Sequence[tuple[Job, Computed]]) -> None:
        """One batch has been computed."""
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
