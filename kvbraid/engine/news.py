"""What the engine tells the event loop, and when.

Where steps run on another device, the tokens of a step are told when the next one is launched: told
at once, the event loop would take the interpreter from the engine for as long as it sends them,
while the device waits for work. A step that keeps the host busy, or none at all, waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbraid.engine.events import EngineEvent, StepReport


class News:
    """Used by the engine thread. Everything is told in the order in which it happened."""

    def __init__(
        self,
        on_event: Callable[[EngineEvent], None],
        on_step: Callable[[StepReport], None],
        *,
        may_wait: bool,
    ) -> None:
        """may_wait: False: told at once. Otherwise `flush` must follow before the engine sleeps."""
        self._on_event = on_event
        self._on_step = on_step
        self._may_wait = may_wait
        self._events: list[EngineEvent] = []
        self._steps: list[StepReport] = []

    def tell(self, event: EngineEvent) -> None:
        """An event of a request."""
        self._events.append(event)
        if not self._may_wait:
            self.flush()

    def report(self, step: StepReport) -> None:
        """A step that computed."""
        self._steps.append(step)
        if not self._may_wait:
            self.flush()

    def flush(self) -> None:
        """Tell what was not told yet."""
        events, self._events = self._events, []
        for event in events:
            self._on_event(event)
        steps, self._steps = self._steps, []
        for step in steps:
            self._on_step(step)
