"""What the engine tells the event loop, and when.

Where steps run on another device, the tokens of a step are told when the next one is launched: told
at once, the event loop would take the interpreter from the engine for as long as it sends them,
while the device waits for work. A step that keeps the host busy, or none at all, waits for nothing.

A message takes the event loop as long whether it brings one token or ten, and the loop's and the
engine's thread share one interpreter. Where steps are shorter than the messages of all sequences
take, tokens in the midst of a text therefore wait for the next ones, some milliseconds at most: a
text's first and last tokens, and everything else that happens, do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvbraid.engine.events import EngineEvent, StepReport, TokensReady
from kvbraid.engine.sequence import SequenceKey

# Several times what a message takes: most of the time is the engine's.
_WAIT_PER_SEQUENCE_S = 0.001
# Tokens then come 50 times a second.
_LONGEST_WAIT_S = 0.02


class News:
    """Used by the engine thread. Everything is told in the order in which it happened."""

    def __init__(
        self,
        on_event: Callable[[EngineEvent], None],
        on_step: Callable[[StepReport], None],
        *,
        may_wait: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """may_wait: False: told at once. Otherwise `flush` must follow before the engine sleeps."""
        self._on_event = on_event
        self._on_step = on_step
        self._may_wait = may_wait
        self._clock = clock
        self._events: list[EngineEvent] = []
        self._steps: list[StepReport] = []
        self._waiting: set[SequenceKey] = set()
        self._is_urgent = False
        self._told_s = 0.0

    def tell(self, event: EngineEvent) -> None:
        """An event of a request."""
        self._events.append(event)
        self._is_urgent = True
        if not self._may_wait:
            self.flush()

    def tell_tokens(self, tokens: TokensReady) -> None:
        """Neither the first nor the last ones of a text."""
        self._events.append(tokens)
        self._waiting.add(tokens.key)
        if not self._may_wait:
            self.flush()

    def report(self, step: StepReport) -> None:
        """A step that computed."""
        self._steps.append(step)
        if not self._may_wait:
            self.flush()

    def flush_due(self) -> None:
        """Tell what was not told yet, but tokens that had better wait for the next step's."""
        if self._is_urgent or self._clock() - self._told_s >= self._longest_wait_s():
            self.flush()
        else:
            self._flush_steps()

    def flush(self) -> None:
        """Tell what was not told yet."""
        if self._events:
            self._told_s = self._clock()
        self._waiting.clear()
        self._is_urgent = False
        events, self._events = self._events, []
        for event in events:
            self._on_event(event)
        self._flush_steps()

    def _flush_steps(self) -> None:
        steps, self._steps = self._steps, []
        for step in steps:
            self._on_step(step)

    def _longest_wait_s(self) -> float:
        """Since the last time that anything was told."""
        return min(_LONGEST_WAIT_S, _WAIT_PER_SEQUENCE_S * len(self._waiting))
