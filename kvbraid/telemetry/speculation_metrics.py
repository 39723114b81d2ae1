"""Metrics of speculative decoding: on the workers of the target, and on the draft service."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvbraid.telemetry.buckets import BATCH_BUCKETS, TOKEN_BUCKETS, WINDOW_BUCKETS
from kvbraid.telemetry.labels import ERROR_REASONS, with_values

MAX_POSITION = 16
_POSITIONS = tuple(str(position) for position in range(1, MAX_POSITION + 1))

TARGET_PARTS = ("tap", "wire", "draft", "verify")
DRAFT_PARTS = ("ingest", "propose")
DRAFT_FALLBACK_REASONS = (
    "timeout", "unavailable", "resync", "refused", "bad_ids", "no_proposal", "not_worthwhile",
    "no_room",
)  # fmt: skip
RESYNC_REASONS = ("evicted", "restarted", "gap")
POOL_STATES = ("used", "free")


class SpeculationMetrics:
    """What speculation does for the sequences of a prefill or decode worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._add_drafts(registry)
        self._add_steps(registry)

    def _add_drafts(self, registry: CollectorRegistry) -> None:
        def by_position(stage: str, text: str) -> Counter:
            name = f"kvbraid_speculation_{stage}_tokens_total"
            counter = Counter(name, text, ["position"], registry=registry)
            return with_values(counter, position=_POSITIONS)

        self.proposed_tokens_total = by_position("proposed", "Drafts that the drafter gave.")
        self.verified_tokens_total = by_position(
            "verified", "Drafts that the target checked; the others did not pay."
        )
        self.accepted_tokens_total = by_position(
            "accepted", "Drafts that equal the target's own sample, with all before them."
        )
        # Of each stage, in the order of a window.
        self._by_position = [
            [counter.labels(position=position) for position in _POSITIONS]
            for counter in (
                self.proposed_tokens_total,
                self.verified_tokens_total,
                self.accepted_tokens_total,
            )
        ]
        self.acceptance_length_tokens = Histogram(
            "kvbraid_speculation_acceptance_length_tokens",
            "Tokens that a sequence gained in a verified step: accepted drafts and one more.",
            buckets=WINDOW_BUCKETS, registry=registry,
        )  # fmt: skip
        self.verify_length_tokens = Histogram(
            "kvbraid_speculation_verify_length_tokens",
            "Tokens of a sequence that a verified step computed: the anchor and its drafts.",
            buckets=WINDOW_BUCKETS, registry=registry,
        )  # fmt: skip

    def _add_steps(self, registry: CollectorRegistry) -> None:
        self.step_seconds = with_values(
            Histogram(
                "kvbraid_speculation_step_seconds",
                "Parts of a speculative step. tap: keeping the rows for the drafter; wire: waiting "
                "for a remote drafter, beyond its own time; draft: the drafter's own time; verify: "
                "the target's forward and sampling.",
                ["part"], buckets=TOKEN_BUCKETS, registry=registry,
            ),
            part=TARGET_PARTS,
        )  # fmt: skip
        self.fallbacks_total = with_values(
            Counter(
                "kvbraid_speculation_fallbacks_total",
                "Times that a sequence decoded plainly although a drafter is configured. timeout: "
                "no answer in time; unavailable: the drafter is away; resync: it wants rows again; "
                "refused: it answered an error; bad_ids: it drafted ids outside the vocabulary, "
                "more than asked for, or impossible confidences, which were cut off; no_proposal: "
                "it had none; not_worthwhile: verifying would have cost more than it gains; "
                "no_room: no pages for a window, or no place in the message to the drafter or in "
                "its context.",
                ["reason"], registry=registry,
            ),
            reason=DRAFT_FALLBACK_REASONS,
        )  # fmt: skip
        self.resyncs_total = with_values(
            Counter(
                "kvbraid_speculation_resyncs_total", "Times that a drafter wanted rows again.",
                ["reason"], registry=registry,
            ),
            reason=RESYNC_REASONS,
        )  # fmt: skip
        self.sent_rows_total = Counter(
            "kvbraid_speculation_sent_rows_total", "Fused rows sent to a remote drafter.",
            registry=registry,
        )  # fmt: skip
        self.push_failures_total = with_values(
            Counter(
                "kvbraid_speculation_push_failures_total",
                "Prompts whose fused rows did not all get to a remote drafter.",
                ["reason"], registry=registry,
            ),
            reason=ERROR_REASONS,
        )  # fmt: skip
        self.unacknowledged_rows = Gauge(
            "kvbraid_speculation_unacknowledged_rows", "Fused rows kept until they are known to be "
            "with the drafter.", registry=registry,
        )  # fmt: skip

    def observe_verified(self, windows: Sequence[tuple[int, int, int]]) -> None:
        """The sequences of one verified step, of each: drafts it got, drafts in its window, drafts
        accepted. A counter is found and raised once for all of them: for each draft it would take
        as long as a step does.

        Raises ValueError unless got >= in the window >= accepted >= 0.
        """
        for window in windows:
            num_proposed, num_verified, num_accepted = window
            if not num_proposed >= num_verified >= num_accepted >= 0:
                raise ValueError(f"{window}: got >= in the window >= accepted >= 0 must hold")
            self.acceptance_length_tokens.observe(num_accepted + 1)
            self.verify_length_tokens.observe(num_verified + 1)
        for counters, counts in zip(self._by_position, zip(*windows, strict=True), strict=False):
            for position in range(max(counts)):
                counter = counters[min(position, MAX_POSITION - 1)]
                counter.inc(sum(count > position for count in counts))

    def observe_part(self, part: str, seconds: float) -> None:
        """Time of a part of a speculative step. Raises ValueError for an unknown part."""
        self.step_seconds.labels(part=_known(part, TARGET_PARTS)).observe(seconds)

    def count_fallback(self, reason: str, num_sequences: int = 1) -> None:
        """Sequences that decode plainly in this step. Raises ValueError for an unknown reason."""
        known = _known(reason, DRAFT_FALLBACK_REASONS)
        self.fallbacks_total.labels(reason=known).inc(num_sequences)

    def count_resync(self, reason: str) -> None:
        """The drafter wants rows again. Raises ValueError for an unknown reason."""
        self.resyncs_total.labels(reason=_known(reason, RESYNC_REASONS)).inc()


class DraftMetrics:
    """The batches of a draft service and what it holds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._add_batches(registry)
        self._add_state(registry)

    def _add_batches(self, registry: CollectorRegistry) -> None:
        self.batch_sequences = Histogram(
            "kvbraid_draft_batch_sequences", "Sequences of a batch.",
            buckets=BATCH_BUCKETS, registry=registry,
        )  # fmt: skip
        self.step_seconds = with_values(
            Histogram(
                "kvbraid_draft_step_seconds", "Parts of a batch.",
                ["part"], buckets=TOKEN_BUCKETS, registry=registry,
            ),
            part=DRAFT_PARTS,
        )  # fmt: skip
        self.ingested_rows_total = Counter(
            "kvbraid_draft_ingested_rows_total", "Fused rows taken in.", registry=registry
        )
        self.proposed_tokens_total = Counter(
            "kvbraid_draft_proposed_tokens_total", "Drafts given.", registry=registry
        )
        self.queue_seconds = Histogram(
            "kvbraid_draft_queue_seconds",
            "Time from a step's arrival to its batch; of one that came over a socket during another"
            " batch, from the beginning of that.",
            buckets=TOKEN_BUCKETS, registry=registry,
        )  # fmt: skip
        self.connected_workers = Gauge(
            "kvbraid_draft_connected_workers", "Decode workers with an open stream.",
            registry=registry,
        )  # fmt: skip
        self.queued_sequences = Gauge(
            "kvbraid_draft_queued_sequences", "Sequences that wait for a batch.", registry=registry
        )

    def _add_state(self, registry: CollectorRegistry) -> None:
        self.held_sequences = Gauge(
            "kvbraid_draft_held_sequences", "Sequences whose rows are held.", registry=registry
        )
        self.pool_tokens = with_values(
            Gauge(
                "kvbraid_draft_pool_tokens", "Tokens of the draft KV pool.",
                ["state"], registry=registry,
            ),
            state=POOL_STATES,
        )  # fmt: skip
        self.evicted_sequences_total = Counter(
            "kvbraid_draft_evicted_sequences_total",
            "Sequences whose rows were given up for others' room.", registry=registry,
        )  # fmt: skip
        self.resyncs_total = with_values(
            Counter(
                "kvbraid_draft_resyncs_total", "Answers that asked for rows again.",
                ["reason"], registry=registry,
            ),
            reason=RESYNC_REASONS,
        )  # fmt: skip

    def observe_batch(self, *, num_sequences: int, num_rows: int, num_proposed: int) -> None:
        """One batch: its sequences, the rows that came with them, the drafts of its answers."""
        self.batch_sequences.observe(num_sequences)
        self.ingested_rows_total.inc(num_rows)
        self.proposed_tokens_total.inc(num_proposed)

    def observe_part(self, part: str, seconds: float) -> None:
        """Time of a part of a batch. Raises ValueError for an unknown part."""
        self.step_seconds.labels(part=_known(part, DRAFT_PARTS)).observe(seconds)

    def set_pool(self, *, num_used: int, num_free: int) -> None:
        """Tokens of the draft KV pool."""
        self.pool_tokens.labels(state="used").set(num_used)
        self.pool_tokens.labels(state="free").set(num_free)

    def count_evicted(self, num_sequences: int = 1) -> None:
        """Sequences lost their rows for others' room."""
        self.evicted_sequences_total.inc(num_sequences)

    def count_resync(self, reason: str) -> None:
        """An answer asks for rows again. Raises ValueError for an unknown reason."""
        self.resyncs_total.labels(reason=_known(reason, RESYNC_REASONS)).inc()


def _known(value: str, accepted: tuple[str, ...]) -> str:
    if value not in accepted:
        raise ValueError(f"{value!r} is no label value; accepted: {', '.join(accepted)}")
    return value
