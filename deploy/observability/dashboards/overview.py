"""Overview: is it up, is it slow, where, and does it fail."""

from __future__ import annotations

from deploy.observability.model import (
    DASHBOARD,
    RECORDED,
    Dashboard,
    Panel,
    Query,
    Row,
    per_label,
    quantiles,
)
from deploy.observability.rules.recording import BAD_OUTCOMES, COUNTED_OUTCOMES

_TTFT = "kvbraid_coordinator_time_to_first_token_seconds"
_PHASE = "kvbraid_coordinator_ttft_phase_seconds"
_GAP = "kvbraid_coordinator_inter_token_latency_seconds"
_REQUESTS = "kvbraid_coordinator_requests_total"
_WORKERS = "kvbraid_coordinator_workers"

PHASE_MEANS = (
    f"sum by (phase) ({DASHBOARD.rate(f'{_PHASE}_sum')}) / on () group_left () "
    f"sum({DASHBOARD.rate(f'{_TTFT}_count')})"
)

_UP = Row(
    "Is it up",
    (
        Panel(
            "Workers up", "How many workers take requests?", "short",
            (Query(f"max by (pool) ({DASHBOARD.series(_WORKERS, state='up')})", "{{pool}}"),),
            "number", 6,
        ),
        Panel(
            "Requests", "How much is asked of it?", "reqps",
            (Query(f"sum({DASHBOARD.rate(_REQUESTS)})", "requests"),), "number", 6,
        ),
        Panel(
            "Failing requests", "Which part of the requests ends in an error of ours?",
            "percentunit",
            (Query(
                f"sum({DASHBOARD.rate(_REQUESTS, outcome=BAD_OUTCOMES)}) / "
                f"sum({DASHBOARD.rate(_REQUESTS, outcome=COUNTED_OUTCOMES)})", "failing"),),
            "number", 6,
        ),
        Panel(
            "In flight", "How many requests are being served, and how many wait for a worker?",
            "short",
            (
                Query("sum(" + DASHBOARD.series("kvbraid_coordinator_in_flight_requests") + ")",
                      "in flight"),
                Query("sum(" + DASHBOARD.series("kvbraid_coordinator_queued_requests") + ")",
                      "queued"),
            ), "number", 6,
        ),
    ),
)  # fmt: skip

_SLOW = Row(
    "Is it slow",
    (
        Panel("Time to first token", "How long until an answer begins?", "s", quantiles(_TTFT)),
        Panel("Time between tokens", "How fast do answers flow?", "s", quantiles(_GAP)),
        Panel(
            "Request duration", "How long do whole requests take?", "s",
            quantiles("kvbraid_coordinator_request_duration_seconds"),
        ),
    ),
)  # fmt: skip

_WHERE = Row(
    "Where the time goes",
    (
        Panel(
            "Time to first token by phase",
            "What does a request wait for on average? The parts add up to the mean.", "s",
            (Query(PHASE_MEANS, "{{phase}}"),), "stacked",
        ),
        Panel(
            "Slow phases", "Which phase makes the slow requests slow?", "s",
            (Query(DASHBOARD.quantile(0.95, _PHASE, ("phase",)), "{{phase}} p95"),),
        ),
        Panel(
            "Wait for the handoff", "How long after the first token do the next ones begin?", "s",
            quantiles("kvbraid_coordinator_handoff_wait_seconds"),
        ),
    ),
)  # fmt: skip

_FAILING = Row(
    "Does it fail",
    (
        Panel("Outcomes", "How do requests end?", "reqps", per_label(_REQUESTS, "outcome"),
              "stacked"),
        Panel("Retries", "Why are attempts repeated?", "ops",
              per_label("kvbraid_coordinator_retries_total", "reason")),
        Panel(
            "Workers by state", "Which workers are missing?", "short",
            (Query(f"max by (pool, state) ({DASHBOARD.series(_WORKERS)}) > 0",
                   "{{pool}} {{state}}"),),
        ),
    ),
)  # fmt: skip

_BUDGET = Row(
    "Error budgets",
    tuple(
        Panel(
            title, "Which part of the last hour and six hours missed the objective?", "percentunit",
            tuple(
                Query(RECORDED.series(f"kvbraid:{name}:ratio_rate{window}"), window)
                for window in ("1h", "6h")
            ),
        )
        for title, name in (
            ("First token too late", "ttft_slow"),
            ("Gap between tokens too long", "inter_token_slow"),
            ("Failed", "request_errors"),
        )
    ),
)  # fmt: skip

OVERVIEW = Dashboard(
    "overview",
    "KVBraid / Overview",
    "Start here: is it up, is it slow, where, does it fail.",
    (_UP, _SLOW, _WHERE, _FAILING, _BUDGET),
)
