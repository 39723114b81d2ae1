"""Speculation: does it pay, where does a step's time go, how is the draft service."""

from __future__ import annotations

from deploy.observability.dashboards.process import process_row
from deploy.observability.model import DASHBOARD, Dashboard, Panel, Query, Row, per_label

_S = "kvbraid_speculation"


def _by_position(stage: str) -> str:
    return f"sum by (position) ({DASHBOARD.rate(f'{_S}_{stage}_tokens_total')})"


def _part(name: str) -> tuple[Query, ...]:
    return (Query(DASHBOARD.mean(name, ("part",)), "{{part}}"),)


_PAYS = Row(
    "Does it pay",
    (
        Panel("Tokens gained a step", "How many tokens does a verified step give a sequence?",
              "short", (Query(DASHBOARD.mean(f"{_S}_acceptance_length_tokens"), "gained"),
                        Query(DASHBOARD.mean(f"{_S}_verify_length_tokens"), "computed")),
              needs="drafter"),
        Panel("Acceptance by position", "How far ahead are drafts right?", "percentunit",
              (Query(f"{_by_position('accepted')} / {_by_position('verified')}", "{{position}}"),),
              needs="drafter"),
        Panel("Verified drafts by position", "Which part of the drafts is worth checking?",
              "percentunit",
              (Query(f"{_by_position('verified')} / {_by_position('proposed')}", "{{position}}"),),
              needs="drafter"),
        Panel("Step by part", "Where does a speculative step spend its time?", "s",
              _part(f"{_S}_step_seconds"), "stacked", needs="drafter"),
        Panel("Plain decoding", "Why do sequences decode without drafts?", "ops",
              per_label(f"{_S}_fallbacks_total", "reason")),
        Panel("Rows for the drafter", "Do rows arrive, are they kept too long?", "short",
              (Query(f"sum({DASHBOARD.rate(f'{_S}_sent_rows_total')})", "sent a second"),
               Query(f"sum({DASHBOARD.series(f'{_S}_unacknowledged_rows')})", "unacknowledged"))),
        Panel("Failed pushes", "Why do rows of a prompt not reach the drafter?", "ops",
              per_label(f"{_S}_push_failures_total", "reason")),
    ),
)  # fmt: skip

_SERVICE = Row(
    "Draft service",
    (
        Panel("Batch", "How many sequences share a step of the drafter?", "short",
              (Query(DASHBOARD.mean("kvbraid_draft_batch_sequences"), "sequences"),
               Query(f"sum({DASHBOARD.series('kvbraid_draft_queued_sequences')})", "queued")),
              needs="draft_service"),
        Panel("Batch by part", "Where does the drafter spend its time?", "s",
              _part("kvbraid_draft_step_seconds"), "stacked", needs="draft_service"),
        Panel("Queue time", "How long do sequences wait for a batch?", "s",
              (Query(DASHBOARD.quantile(0.95, "kvbraid_draft_queue_seconds"), "p95"),),
              needs="draft_service"),
        Panel("Throughput", "What goes in and comes out?", "cps",
              (Query("sum(" + DASHBOARD.rate("kvbraid_draft_ingested_rows_total") + ")", "rows"),
               Query("sum(" + DASHBOARD.rate("kvbraid_draft_proposed_tokens_total") + ")",
                     "drafts")), needs="draft_service"),
        Panel("Pool", "Is there room for more sequences?", "short",
              (Query("sum by (state) (" + DASHBOARD.series("kvbraid_draft_pool_tokens") + ")",
                     "{{state}}"),), "stacked", needs="draft_service"),
        Panel("Workers", "How many decode workers have a stream open?", "short",
              (Query(DASHBOARD.series("kvbraid_draft_connected_workers"), "{{instance}}"),),
              needs="draft_service"),
        Panel("Sequences", "How many are held, how many lost their rows?", "short",
              (Query(f"sum({DASHBOARD.series('kvbraid_draft_held_sequences')})", "held"),
               Query("sum(" + DASHBOARD.rate("kvbraid_draft_evicted_sequences_total") + ")",
                     "evicted a second")), needs="draft_service"),
        Panel("Resyncs", "Why are rows asked for again?", "ops",
              (*per_label("kvbraid_draft_resyncs_total", "reason"),
               *per_label(f"{_S}_resyncs_total", "reason")), needs="draft_service"),
    ),
)  # fmt: skip


def _drafting(row: Row) -> Row:
    """The row with panels that have data only where a draft service runs."""
    panels = tuple(
        Panel(p.title, p.question, p.unit, p.queries, p.kind, p.width, "draft_service")
        for p in row.panels
    )
    return Row(row.title, panels)


SPECULATION = Dashboard(
    "speculation",
    "KVBraid / Speculation",
    "Does drafting pay, and how is the draft service.",
    (_PAYS, _SERVICE, _drafting(process_row("draft"))),
)
