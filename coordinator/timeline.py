"""When the parts of one completion happened, and the metrics that follow from it."""

from __future__ import annotations

import time

from kvbraid.telemetry.metrics import RequestMetrics

_PREFILL = "prefill"


class Timeline:
    """Splits the time to the first token into phases that sum to it, whatever happened on the way.

    intake: until the request was understood. retry: failed attempts. queue: until the workers are
    chosen. decode_admit: until the decode worker has room. prefill: until the prefill worker
    answers the first token, split as soon as that says how long it queued and computed.
    local_prefill: the same on a decode worker that computes the prompt itself.
    """

    def __init__(self, metrics: RequestMetrics, arrived_s: float) -> None:
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._mark_s = arrived_s
        # None once they are observed: nothing is added afterwards.
        self._phases: dict[str, float] | None = {}
        self._prefill_took: tuple[float, float] | None = None
        self._last_token_s: float | None = None
        self._awaits_handoff = False
        self.mark("intake")

    def mark(self, phase: str) -> None:
        """What passed since the last mark belongs to `phase`."""
        now = time.monotonic()
        if self._phases is not None:
            self._phases[phase] = self._phases.get(phase, 0.0) + now - self._mark_s
        self._mark_s = now

    def tokens(self, count: int, phase: str) -> None:
        """`count` tokens go to the client now; `phase` is what the first of all waited for last."""
        if count == 0:
            return
        if self._last_token_s is None:
            self.mark(phase)
            self._metrics.time_to_first_token_seconds.observe(self._mark_s - self._arrived_s)
            self._awaits_handoff = phase == _PREFILL
            if not self._awaits_handoff or self._prefill_took is not None:
                self._observe_phases()
            self._last_token_s = self._mark_s
        else:
            now = time.monotonic()
            self._observe_gap(now - self._last_token_s, count)
            self._last_token_s = now
        self._metrics.completion_tokens_total.inc(count)

    def prefill_took(self, queue_s: float, compute_s: float) -> None:
        """The prefill worker of this attempt says how long the prompt queued and computed there;
        called before or after its first token is taken here."""
        self._prefill_took = queue_s, compute_s
        if self._last_token_s is not None:
            self._observe_phases()

    def attempt_ended(self) -> None:
        """No worker says more. Without a first token, all the time so far went into retries."""
        self._prefill_took = None
        if self._last_token_s is not None:
            self._observe_phases()
        elif self._phases is not None:
            self.mark("retry")
            intake = self._phases["intake"]
            self._phases = {"intake": intake, "retry": sum(self._phases.values()) - intake}

    def _observe_phases(self) -> None:
        for name, seconds in self._split_phases().items():
            self._metrics.ttft_phase_seconds.labels(phase=name).observe(seconds)
        self._phases = None

    def _split_phases(self) -> dict[str, float]:
        """The phases, prefill in its parts where the worker told them. Clocks of two hosts are
        never compared: what its durations leave was spent on the way."""
        phases = dict(self._phases or {})
        if self._prefill_took is None or _PREFILL not in phases:
            return phases
        total = phases.pop(_PREFILL)
        queue_s = min(self._prefill_took[0], total)
        compute_s = min(self._prefill_took[1], total - queue_s)
        delivery_s = total - queue_s - compute_s
        return phases | {
            "prefill_queue": queue_s,
            "prefill_compute": compute_s,
            "prefill_delivery": delivery_s,
        }

    def _observe_gap(self, seconds: float, count: int) -> None:
        if self._awaits_handoff:
            self._awaits_handoff = False
            self._metrics.handoff_wait_seconds.observe(seconds)
        for _ in range(count):
            self._metrics.inter_token_latency_seconds.observe(seconds / count)
