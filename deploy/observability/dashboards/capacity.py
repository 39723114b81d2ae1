"""Capacity: what fills up next, and how much room there is."""

from __future__ import annotations

from deploy.observability.model import DASHBOARD, Dashboard, Panel, Query, Row

_PAGES = "kvbraid_kv_pages"
_TAKEN = "~active|leased"


def _used(role: str) -> str:
    taken = f"sum by (instance) ({DASHBOARD.series(_PAGES, role, state=_TAKEN)})"
    return f"{taken} / sum by (instance) ({DASHBOARD.series(_PAGES, role)})"


def _ratio(part: str, whole: str) -> str:
    return f"{DASHBOARD.series(part)} / {DASHBOARD.series(whole)}"


_POOLS = Row(
    "KV pools",
    (
        Panel("Decode pools", "How full are they? Cached pages count as room.", "percentunit",
              (Query(_used("decode"), "{{instance}}"),)),
        Panel("Prefill pools", "How full are they?", "percentunit",
              (Query(_used("prefill"), "{{instance}}"),)),
        Panel("Full in an hour", "Where does the trend of the last half hour lead?", "percentunit",
              (Query(f"predict_linear({DASHBOARD.series('kvbraid:kv_pool_used:ratio')}[30m], 3600)",
                     "{{instance}}"),)),
        Panel("Tokens that fit", "How much context do the pools hold?", "short",
              (Query("sum by (instance) (" + DASHBOARD.series("kvbraid_kv_pool_tokens") + ")",
                     "{{instance}}"),)),
        Panel("Evictions", "How many cached pages go for new ones?", "ops",
              (Query("sum by (instance) (" + DASHBOARD.rate("kvbraid_kv_evicted_pages_total")
                     + ")", "{{instance}}"),)),
        Panel("Preemptions", "Do running sequences lose their pages?", "ops",
              (Query("sum by (instance) (" + DASHBOARD.rate("kvbraid_engine_preemptions_total")
                     + ")", "{{instance}}"),)),
    ),
)  # fmt: skip

_QUEUES = Row(
    "Queues",
    (
        Panel("Prompts to compute", "How long would the queue take at the present pace?", "s",
              (Query(DASHBOARD.series("kvbraid:prompt_queue:drain_seconds"), "{{instance}}"),)),
        Panel("Batch", "How full is the batch?", "percentunit",
              (Query(_ratio("kvbraid_engine_running_sequences",
                            "kvbraid_engine_max_running_sequences"), "{{instance}}"),)),
        Panel("Waiting room", "How full is the waiting room? A full one refuses.", "percentunit",
              (Query(_ratio("kvbraid_engine_waiting_sequences",
                            "kvbraid_engine_max_waiting_sequences"), "{{instance}}"),)),
        Panel("Refused", "How many requests are refused for want of room?", "reqps",
              (Query("sum(" + DASHBOARD.rate("kvbraid_coordinator_requests_total",
                                             outcome="overloaded") + ")", "refused"),)),
        Panel("Tokens a worker", "How much does each worker compute?", "cps",
              (Query("sum by (instance) (" + DASHBOARD.rate("kvbraid_engine_prompt_tokens_total")
                     + ")", "{{instance}} prompt"),
               Query("sum by (instance) ("
                     + DASHBOARD.rate("kvbraid_engine_generated_tokens_total") + ")",
                     "{{instance}} generated"))),
        Panel("Memory", "Which process or rank runs out of memory?", "bytes",
              (Query(DASHBOARD.series("process_resident_memory_bytes", "~.+"),
                     "{{instance}} process"),
               Query(DASHBOARD.series("kvbraid_rank_free_memory_bytes"),
                     "{{instance}} rank {{rank}} free"))),
    ),
)  # fmt: skip

CAPACITY = Dashboard(
    "capacity",
    "KVBraid / Capacity",
    "What fills up next.",
    (_POOLS, _QUEUES),
)
