"""Prefill and decode: the queue, the steps and the pool of a worker. Both run the same engine."""

from __future__ import annotations

from deploy.observability.dashboards.process import process_row
from deploy.observability.model import DASHBOARD, Dashboard, Panel, Query, Row

_STEP = "kvbraid_engine_step_seconds"
_CANCEL = "kvbraid_engine_cancel_to_free_seconds"


def _queue(role: str) -> Row:
    def gauge(name: str, legend: str) -> Query:
        return Query(DASHBOARD.series(f"kvbraid_engine_{name}", role), f"{{{{instance}}}} {legend}")

    waits = DASHBOARD.quantile(0.95, "kvbraid_engine_queue_seconds", ("instance",), role)
    return Row(
        "Queue",
        (
            Panel("Sequences", "How many run, how many wait?", "short",
                  (gauge("running_sequences", "running"), gauge("waiting_sequences", "waiting"))),
            Panel("Prompt tokens to compute", "How much work is queued?", "short",
                  (gauge("waiting_prompt_tokens", ""),)),
            Panel("Queue time", "How long does a request wait for a place?", "s",
                  (Query(waits, "{{instance}} p95"),)),
        ),
    )  # fmt: skip


def _steps(role: str) -> Row:
    counters = (("prompt_tokens_total", "prompt"), ("generated_tokens_total", "generated"))
    tokens = tuple(
        Query(f"sum({DASHBOARD.rate(f'kvbraid_engine_{name}', role)})", legend)
        for name, legend in counters
    )
    sizes = tuple(
        Query(DASHBOARD.mean(f"kvbraid_engine_step_{name}", of_role=role), name)
        for name in ("sequences", "tokens")
    )
    cancels = Panel(
        "Cancel to free", "How long do cancelled requests hold their pages?", "s",
        (Query(DASHBOARD.quantile(0.95, _CANCEL, (), role), "p95"),),
    )  # fmt: skip
    return Row(
        "Steps",
        (
            Panel("Step time", "Are steps slow?", "s",
                  (Query(DASHBOARD.quantile(0.95, _STEP, ("kind",), role), "{{kind}} p95"),)),
            Panel("Steps by kind", "Do prompts get in the way of decoding?", "ops",
                  (Query(f"sum by (kind) ({DASHBOARD.rate(f'{_STEP}_count', role)})", "{{kind}}"),),
                  "stacked"),
            Panel("Tokens", "How many tokens are computed?", "cps", tokens),
            Panel("Batch", "How full is a step on average?", "short", sizes),
            Panel("Age of the last step", "Does an engine stand still with work queued?", "s",
                  (Query(DASHBOARD.series("kvbraid_engine_step_age_seconds", role),
                         "{{instance}}"),)),
            # A prefill worker mostly learns of a cancel from the decode worker's refusal.
            *((cancels,) if role == "decode" else ()),
        ),
    )  # fmt: skip


def _pool(role: str) -> Row:
    def rate(name: str, by: str = "") -> str:
        total = f"sum by ({by})" if by else "sum"
        return f"{total} ({DASHBOARD.rate(name, role)})"

    hits = f"{rate('kvbraid_kv_prefix_hit_tokens_total')} / "
    hits += rate("kvbraid_kv_prefix_query_tokens_total")
    return Row(
        "KV pool",
        (
            Panel("Pages", "What holds the pool?", "short",
                  (Query(f"sum by (state) ({DASHBOARD.series('kvbraid_kv_pages', role)})",
                         "{{state}}"),), "stacked"),
            Panel("Prefix hits", "Which part of the prompts is found?", "percentunit",
                  (Query(hits, "found"),)),
            Panel("Pressure", "Do sequences lose their pages, do cached pages go?", "ops",
                  (Query(rate("kvbraid_engine_preemptions_total"), "preemptions"),
                   Query(rate("kvbraid_kv_evicted_pages_total"), "evicted pages"))),
            Panel("Wasted tokens", "What is computed and given up?", "cps",
                  (Query(rate("kvbraid_engine_wasted_tokens_total", "reason"), "{{reason}}"),)),
        ),
    )  # fmt: skip


def _worker(role: str, title: str) -> Dashboard:
    return Dashboard(
        role,
        f"KVBraid / {title}",
        f"Queue, steps and KV pool of {role} workers.",
        (_queue(role), _steps(role), _pool(role), process_row(role)),
    )


PREFILL = _worker("prefill", "Prefill")
DECODE = _worker("decode", "Decode")
