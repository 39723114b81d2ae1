"""For every alert: series under which it fires, and some under which it must not."""

from __future__ import annotations

from dataclasses import dataclass

Series = dict[str, str]

_C = 'job="kvbraid",instance="c"'
_D = 'job="kvbraid",instance="d"'
_STOP = f'kvbraid_coordinator_requests_total{{api="http",outcome="stop",{_C}}}'
_PLACED = f'kvbraid_coordinator_placements_total{{path="handoff",{_C}}}'
_TTFT = "kvbraid_coordinator_time_to_first_token_seconds"
_GAP = "kvbraid_coordinator_inter_token_latency_seconds"


@dataclass(frozen=True, slots=True)
class AlertCase:
    """fires and silent: input series of promtool, one sample every `step`; at: when to look."""

    alert: str
    fires: Series
    silent: Series
    at: str = "10m"
    step: str = "15s"


def rising(per_step: float, num_steps: int = 60) -> str:
    """A counter."""
    return f"0+{per_step:g}x{num_steps}"


def flat(value: float, num_steps: int = 60) -> str:
    """A gauge."""
    return f"{value:g}+0x{num_steps}"


def _latency(histogram: str, bound: str, slow: float, num_steps: int) -> Series:
    """100 observations a step, of which a part is above the bound; and as many requests."""
    return {
        f'{histogram}_bucket{{le="{bound}",{_C}}}': rising(100 * (1 - slow), num_steps),
        f"{histogram}_count{{{_C}}}": rising(100, num_steps),
        _STOP: rising(10, num_steps),
    }


def _requests(outcome: str, bad: float, num_steps: int = 60) -> Series:
    """100 requests a step, of which a part ends with `outcome`."""
    return {
        _STOP: rising(100 * (1 - bad), num_steps),
        f'kvbraid_coordinator_requests_total{{api="http",outcome="{outcome}",{_C}}}': rising(
            100 * bad, num_steps
        ),
    }


def _workers(state: str, pool: str = "decode", count: float = 1) -> Series:
    return {f'kvbraid_coordinator_workers{{pool="{pool}",state="{state}",{_C}}}': flat(count)}


def _engine(name: str, value: str) -> Series:
    return {f"kvbraid_engine_{name}{{{_D}}}": value}


def _queue(num_tokens: int, per_second: int) -> Series:
    return _engine("waiting_prompt_tokens", flat(num_tokens)) | _engine(
        "prompt_tokens_total", rising(15 * per_second)
    )


def _pages(active: int, leased: int, cached: int, free: int) -> Series:
    states = {"active": active, "leased": leased, "cached": cached, "free": free}
    return {f'kvbraid_kv_pages{{state="{s}",{_D}}}': flat(n) for s, n in states.items()}


def _lag(part: float) -> Series:
    """Part of the samples below the limit of 250 ms."""
    name = "kvbraid_process_loop_lag_seconds_bucket"
    return {
        f'{name}{{le="0.25",{_D}}}': rising(100 * part),
        f'{name}{{le="0.5",{_D}}}': rising(100),
        f'{name}{{le="+Inf",{_D}}}': rising(100),
    }


def _failures(reason: str, values: str) -> Series:
    return {
        f'kvbraid_handoff_failures_total{{direction="in",reason="{reason}",{_D}}}': values,
        _PLACED: rising(100),
    }


def _info(role: str, target: str) -> Series:
    return {f'kvbraid_process_info{{role="{role}",version="1",{target}}}': flat(1)}


def _speculation(accepted: float, fallbacks: float) -> Series:
    name = "kvbraid_speculation"
    return {
        f'{name}_accepted_tokens_total{{position="1",{_D}}}': rising(100 * accepted, 120),
        f'{name}_verified_tokens_total{{position="1",{_D}}}': rising(100, 120),
        f"{name}_acceptance_length_tokens_count{{{_D}}}": rising(100, 120),
        f'{name}_fallbacks_total{{reason="timeout",{_D}}}': rising(fallbacks, 120),
        f'{name}_fallbacks_total{{reason="not_worthwhile",{_D}}}': rising(1000, 120),
    }


def _expires_in(days: float) -> Series:
    """Prometheus' tests begin at the Unix time 0."""
    name = "kvbraid_tls_certificate_expiry_timestamp_seconds"
    return {f'{name}{{setting="tls_certificate",{_D}}}': flat(86400 * days, 120)}


def _renewals(refused: str) -> Series:
    return {f"kvbraid_tls_refused_renewals{{{_D}}}": refused}


def _started(values: str) -> Series:
    return _info("decode", _D) | {f"process_start_time_seconds{{{_D}}}": values}


_HOUR, _SIX_HOURS = 260, 400

CASES = (
    AlertCase("KVBraidTtftBudgetFast", _latency(_TTFT, "5.0", 0.2, _HOUR),
              _latency(_TTFT, "5.0", 0.1, _HOUR), "62m"),
    AlertCase("KVBraidTtftBudgetSlow", _latency(_TTFT, "5.0", 0.08, _SIX_HOURS),
              _latency(_TTFT, "5.0", 0.05, _SIX_HOURS), "380m", "1m"),
    AlertCase("KVBraidInterTokenBudgetFast", _latency(_GAP, "0.2", 0.2, _HOUR),
              _latency(_GAP, "0.2", 0.1, _HOUR), "62m"),
    AlertCase("KVBraidInterTokenBudgetSlow", _latency(_GAP, "0.2", 0.08, _SIX_HOURS),
              _latency(_GAP, "0.2", 0.05, _SIX_HOURS), "380m", "1m"),
    AlertCase("KVBraidErrorBudgetFast", _requests("unavailable", 0.02, _HOUR),
              _requests("invalid_request", 0.5, _HOUR), "62m"),
    AlertCase("KVBraidErrorBudgetSlow", _requests("deadline", 0.008, _SIX_HOURS),
              _requests("deadline", 0.004, _SIX_HOURS), "380m", "1m"),
    AlertCase("KVBraidNoCoordinator", _info("decode", _D), _info("coordinator", _C)),
    AlertCase("KVBraidNoDecodeWorker", _workers("up", count=0), _workers("up")),
    AlertCase("KVBraidWorkerDown", _workers("down", "prefill"), _workers("draining", "prefill")),
    AlertCase("KVBraidIncompatibleWorker", _workers("incompatible"), _workers("loading")),
    AlertCase("KVBraidRankMissing", {f'kvbraid_rank_up{{rank="3",{_D}}}': flat(0)},
              {f'kvbraid_rank_up{{rank="3",{_D}}}': flat(1)}),
    AlertCase("KVBraidRestarting", _started("1x10 2x10 3x10 4x30"), _started("1x10 2x50")),
    AlertCase("KVBraidEngineStuck", _engine("step_age_seconds", "0+15x60"),
              _engine("step_age_seconds", flat(9))),
    AlertCase("KVBraidEventLoopBlocked", _lag(0.98), _lag(0.995)),
    AlertCase("KVBraidRequestsRefused", _requests("overloaded", 0.05),
              _requests("overloaded", 0.005)),
    AlertCase("KVBraidPromptQueueLong",
              _queue(4000, per_second=100), _queue(2000, per_second=100)),
    AlertCase("KVBraidKvPoolFull", _pages(90, 6, 0, 4), _pages(50, 0, 50, 0)),
    AlertCase("KVBraidPreempting", _engine("preemptions_total", rising(3)),
              _engine("preemptions_total", rising(1)), "12m"),
    AlertCase("KVBraidHandoffsFailing", _failures("LEASE_LOST", rising(5)),
              _failures("CANCELLED", rising(5))),
    AlertCase("KVBraidKvDataLoss", _failures("DATA_LOSS", "0x10 1x50"),
              _failures("LEASE_LOST", "0x10 1x50"), "5m"),
    AlertCase("KVBraidRetriesHigh",
              {_PLACED: rising(100),
               f'kvbraid_coordinator_retries_total{{reason="UNAVAILABLE",{_C}}}': rising(10)},
              {_PLACED: rising(100),
               f'kvbraid_coordinator_retries_total{{reason="UNAVAILABLE",{_C}}}': rising(2)}),
    AlertCase("KVBraidPrefillFallback",
              {_PLACED: rising(100),
               f'kvbraid_process_fallbacks_total{{reason="no_prefill_worker",{_C}}}': rising(10)},
              # One event among few requests.
              {_PLACED: "0x10 2x50",
               f'kvbraid_process_fallbacks_total{{reason="no_prefill_worker",{_C}}}': "0x10 1x50"},
              "5m"),
    AlertCase("KVBraidCertificateExpiring", _expires_in(6.9), _expires_in(7.1), "20m"),
    AlertCase("KVBraidCertificateAlmostExpired", _expires_in(0.9), _expires_in(1.1), "20m"),
    # Files that are replaced one after the other do not fit for a while: here since ten minutes.
    AlertCase("KVBraidRenewalRefused", _renewals("0x10 1x110"), _renewals("0x40 1x80"), "20m"),
    AlertCase("KVBraidAcceptanceLow", _speculation(0.2, 0), _speculation(0.6, 0), "25m"),
    AlertCase("KVBraidDraftsMissing", _speculation(0.6, 100), _speculation(0.6, 10)),
)  # fmt: skip
