"""Coordinator: what comes in, where it is put, what is repeated."""

from __future__ import annotations

from deploy.observability.dashboards.process import process_row
from deploy.observability.model import (
    DASHBOARD,
    Dashboard,
    Panel,
    Query,
    Row,
    per_label,
    quantiles,
)

_PROMPT = "kvbraid_coordinator_prompt_tokens_total"

_TRAFFIC = Row(
    "Traffic",
    (
        Panel("Requests by API", "Who asks?", "reqps",
              per_label("kvbraid_coordinator_requests_total", "api")),
        Panel(
            "Tokens", "How many tokens come in and go out?", "cps",
            (
                Query(f"sum({DASHBOARD.rate(_PROMPT)})", "prompt"),
                Query("sum(" + DASHBOARD.rate("kvbraid_coordinator_completion_tokens_total") + ")",
                      "completion"),
            ),
        ),
        Panel("Prompt length", "Did the prompts get longer?", "short",
              quantiles("kvbraid_coordinator_prompt_length_tokens")),
        Panel(
            "Cached prompt tokens", "Which part of the prompts is served from caches?",
            "percentunit",
            (Query("sum(" + DASHBOARD.rate("kvbraid_coordinator_cached_tokens_total")
                   + f") / sum({DASHBOARD.rate(_PROMPT)})", "cached"),),
        ),
        Panel("In flight", "How many requests does each coordinator serve?", "short",
              (Query(DASHBOARD.series("kvbraid_coordinator_in_flight_requests"), "{{instance}}"),)),
        Panel("Queued", "How many completions wait for a worker?", "short",
              (Query(DASHBOARD.series("kvbraid_coordinator_queued_requests"), "{{instance}}"),)),
    ),
)  # fmt: skip

_PLACEMENT = Row(
    "Placement",
    (
        Panel("Paths", "Which prompts go through a prefill worker?", "ops",
              per_label("kvbraid_coordinator_placements_total", "path"), "stacked"),
        Panel("Fallbacks", "Why are slower ways taken?", "ops",
              per_label("kvbraid_process_fallbacks_total", "reason", "coordinator")),
        Panel("Wasted tokens", "How much is computed again after failed attempts?", "cps",
              per_label("kvbraid_coordinator_wasted_tokens_total", "reason")),
    ),
)  # fmt: skip

COORDINATOR = Dashboard(
    "coordinator",
    "KVBraid / Coordinator",
    "What comes in, where it is put and what is repeated.",
    (_TRAFFIC, _PLACEMENT, process_row("coordinator")),
)
