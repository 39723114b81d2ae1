"""DCP and handoff: the ranks of a stripe, and rows that move between workers."""

from __future__ import annotations

from deploy.observability.model import DASHBOARD, Dashboard, Panel, Query, Row, quantiles

_EXCHANGE = "kvbraid_rank_exchange_seconds"
_DURATION = "kvbraid_handoff_duration_seconds"

_RANKS = Row(
    "Ranks of a stripe",
    (
        Panel(
            "Exchange", "How long does merging partial results take?", "s",
            (Query(DASHBOARD.quantile(0.5, _EXCHANGE, ("exchange",)), "{{exchange}} p50"),
             Query(DASHBOARD.quantile(0.99, _EXCHANGE, ("exchange",)), "{{exchange}} p99")),
            needs="ranks",
        ),
        Panel("Exchange by rank", "Which rank does the others wait for? It waits least itself.",
              "s", (Query(DASHBOARD.mean(_EXCHANGE, ("instance", "rank")),
                          "{{instance}} rank {{rank}}"),), needs="ranks"),
        Panel("Ranks that answer", "Is a rank missing?", "short",
              (Query(DASHBOARD.series("kvbraid_rank_up"), "{{instance}} rank {{rank}}"),)),
        Panel("Free memory", "Which rank runs out of memory?", "bytes",
              (Query(DASHBOARD.series("kvbraid_rank_free_memory_bytes"),
                     "{{instance}} rank {{rank}}"),)),
        Panel("KV pool", "How large is each rank's pool?", "bytes",
              (Query(DASHBOARD.series("kvbraid_kv_pool_bytes"), "{{instance}} rank {{rank}}"),)),
        Panel("Event-loop lag", "Is a rank too busy to take rows?", "s",
              (Query(DASHBOARD.quantile(0.99, "kvbraid_rank_loop_lag_seconds",
                                        ("instance", "rank")), "{{instance}} rank {{rank}}"),)),
    ),
)  # fmt: skip

_HANDOFF = Row(
    "Handoff",
    (
        Panel("Wait of clients", "What does the handoff add after the first token?", "s",
              quantiles("kvbraid_coordinator_handoff_wait_seconds")),
        Panel("After the prompt, by layout", "Which pair of layouts hands over slowly?", "s",
              (Query(DASHBOARD.quantile(0.95, _DURATION, ("layout",), direction="out"),
                     "{{layout}} p95"),)),
        Panel("Grant to last row", "How long are pages reserved before they are used?", "s",
              (Query(DASHBOARD.quantile(0.95, _DURATION, ("layout",), direction="in"),
                     "{{layout}} p95"),)),
        Panel("Bytes", "How much moves, and how?", "Bps",
              (Query("sum by (direction, mover) ("
                     + DASHBOARD.rate("kvbraid_handoff_bytes_total") + ")",
                     "{{direction}} {{mover}}"),)),
        Panel("Failures", "Why do handoffs fail?", "ops",
              (Query("sum by (direction, reason) ("
                     + DASHBOARD.rate("kvbraid_handoff_failures_total") + ")",
                     "{{direction}} {{reason}}"),)),
        Panel("Under way", "Do handoffs pile up?", "short",
              (Query(DASHBOARD.series("kvbraid_handoff_open_leases"),
                     "{{instance}} {{direction}}"),)),
    ),
)  # fmt: skip

HANDOFF = Dashboard(
    "handoff",
    "KVBraid / DCP and handoff",
    "The ranks of a stripe, and rows that move from prefill to decode workers.",
    (_RANKS, _HANDOFF),
)
