from __future__ import annotations

import pytest

from kvbraid.telemetry.metrics import DraftServiceMetrics, WorkerMetrics
from kvbraid.telemetry.speculation_metrics import DRAFT_FALLBACK_REASONS, MAX_POSITION


@pytest.fixture
def worker() -> WorkerMetrics:
    return WorkerMetrics("decode")


def by_position(metrics: WorkerMetrics, stage: str) -> list[float]:
    name = f"kvbraid_speculation_{stage}_tokens_total"
    values = [
        metrics.registry.get_sample_value(name, {"position": str(i)})
        for i in range(1, MAX_POSITION + 1)
    ]
    return [value for value in values if value]


def test_drafts_are_counted_by_position(worker: WorkerMetrics) -> None:
    worker.speculation.observe_verified([(5, 3, 1), (2, 2, 2)])
    worker.speculation.observe_verified([])
    assert by_position(worker, "proposed") == [2, 2, 1, 1, 1]
    assert by_position(worker, "verified") == [2, 2, 1]
    assert by_position(worker, "accepted") == [2, 1]
    value = worker.registry.get_sample_value
    assert value("kvbraid_speculation_acceptance_length_tokens_sum") == 2 + 3
    assert value("kvbraid_speculation_verify_length_tokens_sum") == 4 + 3
    assert value("kvbraid_speculation_acceptance_length_tokens_count") == 2


def test_long_drafts_make_no_new_series(worker: WorkerMetrics) -> None:
    worker.speculation.observe_verified([(20, 20, 18)])
    assert by_position(worker, "accepted") == [1] * 15 + [3]
    assert sum(by_position(worker, "proposed")) == 20


@pytest.mark.parametrize("counts", [(1, 2, 0), (2, 1, 2), (1, 1, -1)])
def test_counts_that_cannot_be_are_refused(worker: WorkerMetrics, counts) -> None:
    with pytest.raises(ValueError, match="must hold"):
        worker.speculation.observe_verified([counts])
    assert by_position(worker, "proposed") == []


def test_parts_fallbacks_and_resyncs(worker: WorkerMetrics) -> None:
    worker.speculation.observe_part("wire", 0.25)
    worker.speculation.count_fallback("timeout", 3)
    worker.speculation.count_resync("gap")
    value = worker.registry.get_sample_value
    assert value("kvbraid_speculation_step_seconds_sum", {"part": "wire"}) == 0.25
    assert value("kvbraid_speculation_fallbacks_total", {"reason": "timeout"}) == 3
    assert value("kvbraid_speculation_resyncs_total", {"reason": "gap"}) == 1
    for reason in DRAFT_FALLBACK_REASONS:
        assert value("kvbraid_speculation_fallbacks_total", {"reason": reason}) is not None


def test_labels_stay_bounded(worker: WorkerMetrics) -> None:
    draft = DraftServiceMetrics().draft
    for call in (
        lambda: worker.speculation.count_fallback("bad luck"),
        lambda: worker.speculation.observe_part("lunch", 1.0),
        lambda: worker.speculation.count_resync("r-17"),
        lambda: draft.observe_part("verify", 1.0),
        lambda: draft.count_resync(""),
    ):
        with pytest.raises(ValueError, match="is no label value; accepted: "):
            call()


def test_the_draft_service_counts_its_batches() -> None:
    metrics = DraftServiceMetrics()
    metrics.draft.observe_batch(num_sequences=3, num_rows=40, num_proposed=21)
    metrics.draft.observe_part("propose", 0.5)
    metrics.draft.set_pool(num_used=10, num_free=90)
    metrics.draft.count_evicted(2)
    metrics.draft.count_resync("evicted")
    value = metrics.registry.get_sample_value
    assert value("kvbraid_draft_batch_sequences_sum") == 3
    assert value("kvbraid_draft_ingested_rows_total") == 40
    assert value("kvbraid_draft_proposed_tokens_total") == 21
    assert value("kvbraid_draft_pool_tokens", {"state": "free"}) == 90
    assert value("kvbraid_draft_evicted_sequences_total") == 2
    assert value("kvbraid_draft_resyncs_total", {"reason": "evicted"}) == 1
