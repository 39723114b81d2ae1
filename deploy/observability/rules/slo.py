"""What an operator chooses: thresholds and objectives, as placeholders in the rules."""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvbraid.telemetry.buckets import REQUEST_BUCKETS, TOKEN_BUCKETS

SELECTOR = "@SELECTOR@"
"""Label matchers that limit the rules to one release; stands inside the braces of a selector."""

RUNBOOK_URL = "@RUNBOOK_URL@"
DEFAULT_RUNBOOK_URL = "https://github.com/kvbraid/kvbraid/blob/main/docs/runbook.md"


@dataclass(frozen=True, slots=True)
class Slo:
    """One number. accepted: all values that work; empty: any."""

    key: str
    default: float
    description: str
    accepted: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"@{self.key.upper()}@"


TTFT_SECONDS = Slo(
    "ttft_seconds", 5.0, "A first token later than this is too late.", REQUEST_BUCKETS
)
TTFT_OBJECTIVE = Slo("ttft_objective", 0.99, "Part of the requests whose first token is in time.")
INTER_TOKEN_SECONDS = Slo(
    "inter_token_seconds", 0.2, "A longer gap between two tokens is too long.", TOKEN_BUCKETS
)
INTER_TOKEN_OBJECTIVE = Slo("inter_token_objective", 0.99, "Part of the gaps that are in time.")
AVAILABILITY_OBJECTIVE = Slo("availability_objective", 0.999, "Part of the requests that succeed.")
MIN_REQUESTS = Slo("min_requests", 20, "Requests an hour below which no budget alert fires.")
KV_USED_RATIO = Slo("kv_used_ratio", 0.95, "A KV pool fuller than this is almost full.")
QUEUE_DRAIN_SECONDS = Slo(
    "queue_drain_seconds", 30, "A prompt queue that takes longer to compute is too long."
)
STEP_AGE_SECONDS = Slo("step_age_seconds", 10, "An engine without a step for longer is stuck.")
LOOP_LAG_SECONDS = Slo("loop_lag_seconds", 0.25, "An event loop later than this is blocked.")
CERTIFICATE_TICKET_DAYS = Slo(
    "certificate_ticket_days", 7, "A certificate that expires in fewer days should be renewed."
)
CERTIFICATE_PAGE_DAYS = Slo(
    "certificate_page_days", 1, "A certificate that expires in fewer days must be renewed now."
)
ACCEPTANCE_RATIO = Slo("acceptance_ratio", 0.4, "A drafter that is right less often is wrong here.")

SLOS = (
    TTFT_SECONDS,
    TTFT_OBJECTIVE,
    INTER_TOKEN_SECONDS,
    INTER_TOKEN_OBJECTIVE,
    AVAILABILITY_OBJECTIVE,
    MIN_REQUESTS,
    KV_USED_RATIO,
    QUEUE_DRAIN_SECONDS,
    STEP_AGE_SECONDS,
    LOOP_LAG_SECONDS,
    CERTIFICATE_TICKET_DAYS,
    CERTIFICATE_PAGE_DAYS,
    ACCEPTANCE_RATIO,
)


def with_defaults(text: str) -> str:
    """The text of a rule file with every placeholder replaced by its default."""
    for slo in SLOS:
        text = text.replace(str(slo), f"{slo.default:g}")
    return text.replace(SELECTOR, "").replace(RUNBOOK_URL, DEFAULT_RUNBOOK_URL)


def to_json() -> str:
    """What the chart reads: for each key its placeholder, default, accepted values and meaning."""
    facts = {
        slo.key: {
            "placeholder": str(slo),
            "default": slo.default,
            "accepted": list(slo.accepted),
            "description": slo.description,
        }
        for slo in SLOS
    }
    return json.dumps(facts, indent=2) + "\n"
