"""Feeds phases of prompts to an engine and collects what comes out."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from kvbraid.engine.engine import Engine
from kvbraid.engine.events import EngineEvent, RequestFailed, StepReport, TokensReady
from kvbraid.engine.sequence import EngineRequest, SequenceKey
from tools.engine_case import Outcome, Prompt


class EngineRun:
    """Feeds the phases to the engine and collects what comes out."""

    engine: Engine

    def __init__(self, phases: list[list[Prompt]]) -> None:
        self._phases = phases
        self._phase = -1
        self._open: dict[SequenceKey, tuple[int, int]] = {}
        self.outcome = Outcome()
        self.failure: Exception | None = None

    def submit_phase(self) -> None:
        """Start the next phase, or ask for the rows and stop."""
        self._phase += 1
        if self._phase == len(self._phases):
            self.engine.report_rows(self._finish)
            return
        phase = self._phases[self._phase]
        self.outcome.tokens.append([[] for _ in phase])
        self.outcome.cached.append([0] * len(phase))
        for number, prompt in enumerate(phase):
            key = SequenceKey(f"{self._phase}-{number}", 0, prompt.index)
            self._open[key] = (self._phase, number)
            sampling = replace(prompt.sampling, max_tokens=prompt.max_tokens)
            self.engine.submit(
                EngineRequest(key, prompt.token_ids, len(prompt.token_ids), sampling)
            )

    def on_event(self, event: EngineEvent) -> None:
        """Engine events, in its thread."""
        if isinstance(event, RequestFailed):
            self.failure = event.error
            self.engine.stop()
        elif isinstance(event, TokensReady):
            phase, number = self._open[event.key]
            self.outcome.tokens[phase][number] += event.chunk.token_ids
            self.outcome.cached[phase][number] = event.num_cached_tokens
            if event.chunk.finish_reason is not None:
                del self._open[event.key]
                if not self._open:
                    self.submit_phase()

    def on_step(self, report: StepReport) -> None:
        """Figures of a step."""
        self.outcome.num_preemptions = report.num_preemptions
        self.outcome.steps.append(
            (time.perf_counter(), report.num_decodes, report.num_extend_tokens, report.num_sampled)
        )

    def _finish(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self.outcome.rows = rows.tolist()
        self.engine.stop()
