"""Which ended sequences a draft service has yet to forget."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from kvbraid.speculative.proposal import DraftTask
from kvbraid.transport.draft_step import MAX_DROPPED_KEYS
from kvbraid.transport.draft_stream import DraftStream, SentStep


class EndedSequences:
    """Names travel with steps, and again with the next one where a step was lost with its stream:
    the service keeps a worker's sequences from one stream to the next. Thread-safe.

    While the service is away for long, the newest MAX_DROPPED_KEYS are kept; it forgets the
    sequences of a worker without a stream by itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._untold: deque[str] = deque(maxlen=MAX_DROPPED_KEYS)
        self._told: list[tuple[SentStep, list[str]]] = []

    def add(self, key: str) -> None:
        """A sequence has ended."""
        with self._lock:
            self._untold.append(key)

    def are_left(self) -> bool:
        """Whether a step has names to take along."""
        with self._lock:
            self._take_back()
            return bool(self._untold)

    def begin_step(self, stream: DraftStream, tasks: Sequence[DraftTask]) -> SentStep:
        """Send a step of `tasks` with every name that is left."""
        with self._lock:
            self._take_back()
            names = list(self._untold)
            self._untold.clear()
        step = stream.begin_step(tasks, names)
        if names:
            with self._lock:
                self._told.append((step, names))
        return step

    def _take_back(self) -> None:
        """Names of lost steps, before those that came later."""
        waiting = []
        for step, names in self._told:
            if not step.is_done:
                waiting.append((step, names))
            elif step.answered is None:
                room = MAX_DROPPED_KEYS - len(self._untold)
                self._untold.extendleft(reversed(names[max(0, len(names) - room) :]))
        self._told = waiting
