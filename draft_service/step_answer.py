"""The answer to one step, for whoever asks for it and whoever repeats the question."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvbraid.errors import KVBraidError
from kvbraid.transport.draft_answers import AnsweredStep

Outcome = AnsweredStep | KVBraidError
OnOutcome = Callable[[Outcome], object]


class StepAnswer:
    """Comes once, from whichever thread has it, and is kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcome: Outcome | None = None
        self._asking: list[OnOutcome] = []

    def then(self, on_outcome: OnOutcome) -> None:
        """Call `on_outcome` with the answer: now, or later in the thread that has it."""
        with self._lock:
            if self._outcome is None:
                self._asking.append(on_outcome)
                return
        on_outcome(self._outcome)

    def settle(self, outcome: Outcome) -> None:
        """Here it is, or why there will be none."""
        with self._lock:
            self._outcome = outcome
            asking, self._asking = self._asking, []
        for on_outcome in asking:
            on_outcome(outcome)
