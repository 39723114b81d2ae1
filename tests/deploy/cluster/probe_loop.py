"""One probe of a container: when it is due and what its results say."""

from __future__ import annotations

from typing import Any

# Periods and preStop sleeps are this much shorter than the manifests say, so that tests are quick.
# Time limits and numbers of failures are as they are.
TIME_FACTOR = 0.1


class ProbeLoop:
    """Counts results as a kubelet does. `state` is None until thresholds have decided."""

    def __init__(self, spec: dict[str, Any], now: float) -> None:
        self.spec = spec
        self.state: bool | None = None
        self.last = ""
        self._period_s = spec.get("periodSeconds", 10) * TIME_FACTOR
        self._due = now + spec.get("initialDelaySeconds", 0) * TIME_FACTOR
        self._num_alike = 0
        self._was_success: bool | None = None

    def is_due(self, now: float) -> bool:
        """Whether to probe now; the next time is a period later."""
        if now < self._due:
            return False
        self._due = now + self._period_s
        return True

    def take(self, failure: str) -> None:
        """A result: empty for success."""
        success = not failure
        self._num_alike = self._num_alike + 1 if success == self._was_success else 1
        self._was_success = success
        self.last = failure
        threshold = self.spec.get("successThreshold" if success else "failureThreshold", 0)
        if self._num_alike >= (threshold or (1 if success else 3)):
            self.state = success
