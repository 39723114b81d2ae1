"""When the parts of one completion happened, and the metrics that follow from it."""

from __future__ import annotations

import time

from kvbraid.telemetry.metrics import RequestMetrics


class Timeline:
    """Splits the time to the first token into phases that sum to it, whatever happened on the way.

    queue: until the workers are chosen, failed attempts included. decode_admit: until the decode
    worker has room. prefill: until the prefill worker answers the first token. first_step: the
    same on a decode worker that computes the prompt itself, its queue included.
    """

    def __init__(self, metrics: RequestMetrics, arrived_s: float) -> None:
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._mark_s = arrived_s
        self._phases: dict[str, float] = {}
        self._last_token_s: float | None = None

    def mark(self, phase: str) -> None:
        """What passed since the last mark belongs to `phase`."""
        now = time.monotonic()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._mark_s
        self._mark_s = now

    def retry(self) -> None:
        """The attempt failed: all the time so far was spent waiting for a good one."""
        self.mark("queue")
        self._phases = {"queue": sum(self._phases.values())}

    def tokens(self, count: int, phase: str) -> None:
        """`count` tokens go to the client now; `phase` is what the first of all waited for last."""
        if count == 0:
            return
        now = time.monotonic()
        if self._last_token_s is None:
            self.mark(phase)
            self._metrics.time_to_first_token_seconds.observe(self._mark_s - self._arrived_s)
            for name, seconds in self._phases.items():
                self._metrics.ttft_phase_seconds.labels(phase=name).observe(seconds)
        else:
            gap = (now - self._last_token_s) / count
            for _ in range(count):
                self._metrics.inter_token_latency_seconds.observe(gap)
        self._metrics.completion_tokens_total.inc(count)
        self._last_token_s = now
