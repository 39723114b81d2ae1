"""Executes step plans on one rank: state operations, compute, KV arrivals and departures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from attention.interface import Group
from kvbraid.engine.debug_guard import StepGuard
from kvbraid.engine.kv_exchange import KvExchange
from kvbraid.engine.model_runner import ModelRunner, WindowedDecode
from kvbraid.engine.rank_state import RankSequence, RankState
from kvbraid.engine.step_plan import (
    AddPages,
    Admit,
    AppendToken,
    BeginSend,
    BindSend,
    CloseGrant,
    EndSend,
    Extend,
    OpenGrant,
    Operation,
    Release,
    StepPlan,
    Stop,
)
from kvbraid.request import PositionLogprobs
from kvbraid.speculative.acceptance import accepted_length

Window = tuple[RankSequence, tuple[int, ...]]
"""A sequence and the drafts that are verified behind its newest token."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave; `tokens` and `logprobs` are equal on every rank.

    tokens: new token ids by slot: one, and one more for each accepted draft. logprobs: as many
    entries where they were asked for. invalid: slots whose first logits were not finite; they got
    no token. progress: [tp_size, num_collected, 4] int64 of
    `TransferProgress` fields. rows: [tp_size, 2] int64, finite pool rows and pool bytes a rank.
    """

    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    logprobs: dict[int, tuple[PositionLogprobs, ...]] = field(default_factory=dict)
    invalid: tuple[int, ...] = ()
    progress: NDArray[np.int64] | None = None
    rows: NDArray[np.int64] | None = None
    stopped: bool = False


class RankExecutor:
    """One rank's half of the engine. Only the engine thread calls it; it alone touches the pool."""

    def __init__(
        self,
        *,
        runner: ModelRunner,
        state: RankState,
        exchange: KvExchange,
        control_group: Group,
        guard: StepGuard,
    ) -> None:
        self.runner = runner
        self._state = state
        self._exchange = exchange
        self._control_group = control_group
        self._guard = guard

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one plan. Every rank of the worker executes the same plans in the same order."""
        self.move_rows()
        for operation in plan.operations:
            self._apply(operation)
        decode = WindowedDecode(
            [self._state[d.slot] for d in plan.decodes], [d.drafts for d in plan.decodes]
        )
        self._guard.check_inputs(plan, decode)
        output = self._compute(decode, plan.extends) if plan.has_compute else StepOutput()
        if plan.confirm:
            self._control_group.barrier()
        return replace(
            output,
            progress=self._collect(plan) if plan.collect else None,
            rows=self._report_rows() if plan.report_rows else None,
            stopped=any(isinstance(o, Stop) for o in plan.operations),
        )

    def move_rows(self) -> bool:
        """Take arrived KV rows into the pool and hand computed ones to the sender.

        Called before each step and again and again while the rank waits for one. Returns whether
        anything moved.
        """
        return self._exchange.move_rows()

    def _apply(self, operation: Operation) -> None:
        match operation:
            case Admit():
                self._state.admit(operation)
                self.runner.renew_pages(operation.pages, operation.num_computed)
            case AddPages():
                self._state.add_pages(operation)
                self.runner.renew_pages(operation.pages, 0)
            case AppendToken():
                self._state[operation.slot].append(operation.token_id)
            case Release():
                self._state.release(operation.slot)
            case OpenGrant():
                self._exchange.open_grant(operation.grant, self._state.pages_of(operation.slot))
            case CloseGrant():
                self._exchange.close_grant(operation.transfer_id)
            case BeginSend():
                self._exchange.begin_send(operation.grant)
            case BindSend():
                self._exchange.bind_send(
                    operation.slot, operation.transfer_id, self._state.pages_of(operation.slot)
                )
            case EndSend():
                self._exchange.end_send(operation.transfer_id)
            case Stop():
                pass

    def _compute(self, decode: WindowedDecode, extends: Sequence[Extend]) -> StepOutput:
        logits = self.runner.forward(decode, extends)
        for extend in extends:
            self._exchange.rows_computed(extend.slot, extend.start + extend.length)
        windows = list(zip(decode.sequences, decode.drafts, strict=True))
        windows += [(self._state[e.slot], ()) for e in extends if e.sample]
        return self._sample(logits, windows) if windows else StepOutput()

    def _sample(self, logits: torch.Tensor, windows: Sequence[Window]) -> StepOutput:
        sequences = [sequence for sequence, drafts in windows for _ in range(len(drafts) + 1)]
        assumed = [drafts[:row] for _, drafts in windows for row in range(len(drafts) + 1)]
        result = self.runner.sample(logits, sequences, assumed)
        samples, is_valid = result.token_ids.tolist(), result.is_valid.tolist()
        tokens: dict[int, tuple[int, ...]] = {}
        logprobs: dict[int, tuple[PositionLogprobs, ...]] = {}
        invalid: list[int] = []
        first = 0
        for sequence, drafts in windows:
            rows = range(first, first + len(drafts) + 1)
            first = rows.stop
            emitted = emitted_rows(drafts, samples[rows.start :], is_valid[rows.start :])
            if not emitted:
                invalid.append(sequence.slot)
                continue
            kept = rows[:emitted]
            tokens[sequence.slot] = tuple(samples[row] for row in kept)
            for token_id in tokens[sequence.slot]:
                sequence.append(token_id)
            entries = tuple(e for e in result.logprobs[kept.start : kept.stop] if e is not None)
            if entries:
                logprobs[sequence.slot] = entries
        self._guard.check_sampled(tokens, invalid)
        return StepOutput(tokens, logprobs, tuple(invalid))

    def _collect(self, plan: StepPlan) -> NDArray[np.int64]:
        local = np.array([self._exchange.progress(t) for t in plan.collect], dtype=np.int64)
        return self._gather(local)

    def _report_rows(self) -> NDArray[np.int64]:
        pool = self.runner.pool
        return self._gather(np.array([pool.count_finite_rows(), pool.num_bytes], dtype=np.int64))

    def _gather(self, local: NDArray[np.int64]) -> NDArray[np.int64]:
        gathered = self._control_group.all_gather(torch.from_numpy(local))
        return gathered.numpy()


def emitted_rows(drafts: Sequence[int], samples: Sequence[int], is_valid: Sequence[bool]) -> int:
    """How many of a window's samples are emitted: those whose drafts before them all came true.

    samples[i] is the target's own token after drafts[:i]. The emitted token is always the
    target's sample, so nothing that a drafter says changes the output. Rows from the first one
    that is not valid on are never emitted: 0 where that is the first.
    """
    num_rows = len(drafts) + 1
    num_emitted = accepted_length(drafts, samples[:num_rows]) + 1
    return next((row for row in range(num_emitted) if not is_valid[row]), num_emitted)
