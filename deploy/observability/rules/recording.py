"""Recording rules: the ratios that alerts and dashboards share."""

from __future__ import annotations

from deploy.observability.rules.rule import RULES, Recording, RuleGroup, whole
from deploy.observability.rules.slo import INTER_TOKEN_SECONDS, TTFT_SECONDS, Slo

BAD_OUTCOMES = "~unavailable|data_loss|lease_lost|internal|deadline|overloaded|incompatible"
# What the client did wrong or gave up on says nothing about us.
COUNTED_OUTCOMES = "!~invalid_request|not_found|cancelled|abort"
WINDOWS = ("5m", "30m", "1h", "6h")

_REQUESTS = "kvbraid_coordinator_requests_total"
_TTFT = "kvbraid_coordinator_time_to_first_token_seconds"
_GAP = "kvbraid_coordinator_inter_token_latency_seconds"


def _slow(histogram: str, threshold: Slo, window: str) -> str:
    """Part of a histogram's observations above the threshold, which is one of its bounds."""
    # The client library writes whole bounds as 5.0, an operator writes 5.
    in_time = RULES.rate(f"{histogram}_bucket", window=window, le=f"~{threshold}([.]0)?")
    return f"1 - {whole(in_time)} / {whole(RULES.rate(f'{histogram}_count', window=window))}"


def _failed(window: str) -> str:
    bad = RULES.rate(_REQUESTS, window=window, outcome=BAD_OUTCOMES)
    counted = RULES.rate(_REQUESTS, window=window, outcome=COUNTED_OUTCOMES)
    return f"{whole(bad)} / {whole(counted)}"


def _ratios(window: str) -> tuple[Recording, ...]:
    suffix = f"ratio_rate{window}"
    return (
        Recording(f"kvbraid:ttft_slow:{suffix}", _slow(_TTFT, TTFT_SECONDS, window)),
        Recording(f"kvbraid:inter_token_slow:{suffix}", _slow(_GAP, INTER_TOKEN_SECONDS, window)),
        Recording(f"kvbraid:request_errors:{suffix}", _failed(window)),
    )


_PAGES = "kvbraid_kv_pages"
_QUEUED = RULES.series("kvbraid_engine_waiting_prompt_tokens")
_COMPUTED = RULES.rate("kvbraid_engine_prompt_tokens_total")

_LEVELS = (
    Recording(
        "kvbraid:requests:increase1h",
        whole(f"increase({RULES.series(_REQUESTS, outcome=COUNTED_OUTCOMES)}[1h])"),
    ),
    Recording(
        "kvbraid:kv_pool_used:ratio",
        f"sum without (state) ({RULES.series(_PAGES, state='~active|leased')}) / "
        f"sum without (state) ({RULES.series(_PAGES)})",
    ),
    # Nothing queued takes no time, also while nothing is computed.
    Recording(
        "kvbraid:prompt_queue:drain_seconds",
        f"({_QUEUED} / {_COMPUTED}) and {_QUEUED} > 0 or {_QUEUED} * 0",
    ),
)

RECORDING = RuleGroup(
    "kvbraid.recording",
    "15s",
    (*(rule for window in WINDOWS for rule in _ratios(window)), *_LEVELS),
)
