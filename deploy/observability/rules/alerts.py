"""Alerts. Symptoms that clients feel page; causes that will become symptoms page or ticket."""

from __future__ import annotations

from typing import Literal

from deploy.observability.rules.rule import RULES, Alert, RuleGroup, whole
from deploy.observability.rules.slo import (
    ACCEPTANCE_RATIO,
    AVAILABILITY_OBJECTIVE,
    CERTIFICATE_PAGE_DAYS,
    CERTIFICATE_TICKET_DAYS,
    INTER_TOKEN_OBJECTIVE,
    KV_USED_RATIO,
    LOOP_LAG_SECONDS,
    MIN_REQUESTS,
    QUEUE_DRAIN_SECONDS,
    STEP_AGE_SECONDS,
    TTFT_OBJECTIVE,
    Slo,
)

_S = RULES.series
_R = RULES.rate

_WORKERS = "kvbraid_coordinator_workers"
_FAILURES = "kvbraid_handoff_failures_total"
_REQUESTS = "kvbraid_coordinator_requests_total"
_PLACEMENTS = "kvbraid_coordinator_placements_total"

# Fewer events in the five minutes of a rate say nothing about a share.
_FEW_A_SECOND = "0.01"


def _share(part: str, of: str, limit: float) -> str:
    """How often a second the part happens, where that is above a share and not just once."""
    return f"{whole(part)} > {limit} * {whole(of)} and {whole(part)} > {_FEW_A_SECOND}"


def _burn(factor: float, ratio: str, objective: Slo, short: str, long: str) -> str:
    """The budget is spent `factor` times too fast over both windows, and there is traffic."""
    limit = f"{factor:g} * (1 - {objective})"
    return (
        f"{_S(f'kvbraid:{ratio}:ratio_rate{short}')} > {limit} and "
        f"{_S(f'kvbraid:{ratio}:ratio_rate{long}')} > {limit} and "
        f"{_S('kvbraid:requests:increase1h')} >= {MIN_REQUESTS}"
    )


def _burns(name: str, ratio: str, objective: Slo, what: str) -> tuple[Alert, ...]:
    """Two percent of a month's budget in an hour, and five percent in six hours."""
    speeds: tuple[tuple[str, float, str, str, str, Literal["page", "ticket"]], ...] = (
        ("Fast", 14.4, "5m", "1h", "1m", "page"),
        ("Slow", 6, "30m", "6h", "15m", "ticket"),
    )
    return tuple(
        Alert(
            f"KVBraid{name}Budget{speed}",
            _burn(factor, ratio, objective, short, long),
            hold, severity,
            f"{{{{ $value | humanizePercentage }}}} {what} over {short}: the error budget is spent "
            f"more than {factor:g} times too fast.",
        )
        for speed, factor, short, long, hold, severity in speeds
    )  # fmt: skip


_BUDGETS = (
    *_burns("Ttft", "ttft_slow", TTFT_OBJECTIVE, "of first tokens came too late"),
    *_burns("InterToken", "inter_token_slow", INTER_TOKEN_OBJECTIVE,
            "of gaps between tokens were too long"),
    *_burns("Error", "request_errors", AVAILABILITY_OBJECTIVE, "of requests failed"),
)  # fmt: skip

_PRESENCE = (
    Alert(
        "KVBraidNoCoordinator", f"absent({_S('kvbraid_process_info', role='coordinator')})",
        "2m", "page", "No coordinator is scraped.",
    ),
    Alert(
        "KVBraidNoDecodeWorker",
        f"max by (namespace) ({_S(_WORKERS, pool='decode', state='up')}) == 0",
        "1m", "page", "No coordinator has a decode worker that is up: every request fails.",
    ),
    Alert(
        "KVBraidWorkerDown",
        f"max by (namespace, pool) ({_S(_WORKERS, state='down')}) > 0",
        "2m", "ticket", "{{ $value }} {{ $labels.pool }} workers are down.",
    ),
    Alert(
        "KVBraidIncompatibleWorker",
        f"max by (namespace, pool) ({_S(_WORKERS, state='incompatible')}) > 0",
        "2m", "ticket",
        "{{ $value }} {{ $labels.pool }} workers serve other weights and get no work.",
    ),
    Alert(
        "KVBraidRankMissing", f"{_S('kvbraid_rank_up')} == 0",
        "1m", "page", "Rank {{ $labels.rank }} of {{ $labels.instance }} does not answer.",
    ),
    Alert(
        "KVBraidRestarting",
        f"changes({_S('process_start_time_seconds')}[15m]) > 2 and on (job, instance) "
        f"{_S('kvbraid_process_info')}",
        "1m", "ticket", "{{ $labels.instance }} started {{ $value }} times in 15 minutes.",
    ),
)  # fmt: skip

_ENGINE = (
    Alert(
        "KVBraidEngineStuck", f"{_S('kvbraid_engine_step_age_seconds')} > {STEP_AGE_SECONDS}",
        "1m", "page",
        "The engine of {{ $labels.instance }} is in one step for {{ $value | humanizeDuration }}.",
    ),
    Alert(
        "KVBraidEventLoopBlocked",
        RULES.quantile(0.99, "kvbraid_process_loop_lag_seconds", ("namespace", "job", "instance"))
        + f" > {LOOP_LAG_SECONDS}",
        "2m", "ticket", "The event loop of {{ $labels.instance }} is {{ $value | "
        "humanizeDuration }} late.",
    ),
    Alert(
        "KVBraidRequestsRefused",
        _share(_R(_REQUESTS, outcome="overloaded"), _R(_REQUESTS), 0.01),
        "2m", "page", "{{ $value | humanize }} requests a second are refused for want of room.",
    ),
    Alert(
        "KVBraidPromptQueueLong",
        f"{_S('kvbraid:prompt_queue:drain_seconds')} > {QUEUE_DRAIN_SECONDS}",
        "2m", "ticket",
        "The prompts queued at {{ $labels.instance }} take {{ $value | humanizeDuration }}.",
    ),
    Alert(
        "KVBraidKvPoolFull", f"{_S('kvbraid:kv_pool_used:ratio')} > {KV_USED_RATIO}",
        "2m", "ticket", "The KV pool of {{ $labels.instance }} is {{ $value | "
        "humanizePercentage }} full.",
    ),
    Alert(
        "KVBraidPreempting",
        f"{_R('kvbraid_engine_preemptions_total')} > 0.1",
        "5m", "ticket",
        "{{ $labels.instance }} takes the pages of {{ $value | humanize }} sequences a second.",
    ),
)  # fmt: skip

_HANDOFF = (
    Alert(
        "KVBraidHandoffsFailing",
        _share(
            _R(_FAILURES, direction="in", reason="!~CANCELLED|DEADLINE"),
            _R(_PLACEMENTS, path="handoff"), 0.02,
        ),
        "2m", "page", "{{ $value | humanize }} handoffs a second fail.",
    ),
    Alert(
        "KVBraidKvDataLoss",
        f"sum without (direction) (increase({_S(_FAILURES, reason='DATA_LOSS')}[10m])) > 0",
        "0m", "page", "{{ $labels.instance }} refused damaged, late or repeated KV rows.",
    ),
    Alert(
        "KVBraidRetriesHigh",
        _share(_R("kvbraid_coordinator_retries_total"), _R(_PLACEMENTS), 0.05),
        "2m", "ticket", "{{ $value | humanize }} attempts a second are repeated.",
    ),
    Alert(
        "KVBraidPrefillFallback",
        _share(
            _R("kvbraid_process_fallbacks_total", reason="no_prefill_worker"), _R(_PLACEMENTS), 0.02
        ),
        "2m", "ticket", "Decode workers compute prompts because no prefill worker is up.",
    ),
)  # fmt: skip

_DAY_S = 86400


def _expires_in(days: Slo) -> str:
    """Seconds that are left, where they are fewer; below 0 once it has expired."""
    expiry = _S("kvbraid_tls_certificate_expiry_timestamp_seconds")
    return f"{expiry} - time() < {days} * {_DAY_S}"


_TIME_LEFT = (
    "What {{ $labels.setting }} of {{ $labels.instance }} names {{ if lt $value 0.0 }}has expired"
    "{{ else }}expires in {{ $value | humanizeDuration }}{{ end }}."
)

_CERTIFICATES = (
    Alert(
        "KVBraidCertificateExpiring", _expires_in(CERTIFICATE_TICKET_DAYS),
        "15m", "ticket", _TIME_LEFT,
    ),
    Alert(
        "KVBraidCertificateAlmostExpired", _expires_in(CERTIFICATE_PAGE_DAYS),
        "15m", "page", _TIME_LEFT,
    ),
    Alert(
        "KVBraidRenewalRefused", f"{_S('kvbraid_tls_refused_renewals')} > 0",
        "15m", "ticket",
        "{{ $labels.instance }} cannot use its changed certificate files and keeps the old ones.",
    ),
)  # fmt: skip

_SPEC_ACCEPTED = whole(_R("kvbraid_speculation_accepted_tokens_total", position="1"))
_SPEC_VERIFIED = whole(_R("kvbraid_speculation_verified_tokens_total", position="1"))
_SPEC_STEPS = whole(_R("kvbraid_speculation_acceptance_length_tokens_count"))
_SPEC_PLAIN = whole(
    _R("kvbraid_speculation_fallbacks_total", reason="~timeout|unavailable|resync|refused|bad_ids")
)

_SPECULATION = (
    Alert(
        "KVBraidAcceptanceLow",
        f"{_SPEC_ACCEPTED} / {_SPEC_VERIFIED} < {ACCEPTANCE_RATIO} and {_SPEC_VERIFIED} > 1",
        "15m", "ticket", "Only {{ $value | humanizePercentage }} of first drafts are accepted.",
    ),
    Alert(
        "KVBraidDraftsMissing",
        f"{_SPEC_PLAIN} > 0.2 * ({_SPEC_STEPS} + {_SPEC_PLAIN})",
        "2m", "ticket",
        "{{ $value | humanize }} sequence-steps a second get no drafts in time.",
    ),
)  # fmt: skip

ALERTS = RuleGroup(
    "kvbraid.alerts",
    "15s",
    (*_BUDGETS, *_PRESENCE, *_ENGINE, *_HANDOFF, *_CERTIFICATES, *_SPECULATION),
)
