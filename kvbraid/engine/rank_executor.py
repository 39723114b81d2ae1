"""Executes step plans on one rank: state operations, compute, KV arrivals and departures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from attention.interface import Group
from kvbraid.engine.debug_guard import StepGuard
from kvbraid.engine.kv_exchange import KvExchange
from kvbraid.engine.model_runner import ModelRunner, WindowedDecode
from kvbraid.engine.rank_state import RankState
from kvbraid.engine.step_plan import (
    AddPages,
    Admit,
    AppendToken,
    BeginSend,
    BindSend,
    CloseGrant,
    EndSend,
    OpenGrant,
    Operation,
    Release,
    StepPlan,
    Stop,
)
from kvbraid.engine.verification import Verification, Window
from kvbraid.request import PositionLogprobs


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
        verification: Verification,
    ) -> None:
        self.runner = runner
        self._verification = verification
        self._state = state
        self._exchange = exchange
        self._control_group = control_group
        self._guard = guard
        # Called in each step that computes, when its forward pass is launched.
        self.on_launched: Callable[[], None] = lambda: None

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one plan. Every rank of the worker executes the same plans in the same order."""
        self.move_rows()
        for operation in plan.operations:
            self._apply(operation)
        decode = WindowedDecode(
            [self._state[d.slot] for d in plan.decodes], [d.drafts for d in plan.decodes]
        )
        self._guard.check_inputs(plan, decode)
        output = self._compute(decode, plan) if plan.has_compute else StepOutput()
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
                self.runner.close()

    def _compute(self, decode: WindowedDecode, plan: StepPlan) -> StepOutput:
        extends = plan.extends
        logits = self.runner.forward(decode, extends, with_taps=plan.taps)
        for extend in extends:
            self._exchange.rows_computed(extend.slot, extend.start + extend.length)
        self.on_launched()
        windows = list(zip(decode.sequences, decode.drafts, strict=True))
        windows += [(self._state[e.slot], ()) for e in extends if e.sample]
        return self._sample(logits, windows) if windows else StepOutput()

    def _sample(self, logits: torch.Tensor, windows: Sequence[Window]) -> StepOutput:
        verified = self._verification.verify(self.runner, logits, windows)
        tokens: dict[int, tuple[int, ...]] = {}
        logprobs: dict[int, tuple[PositionLogprobs, ...]] = {}
        invalid: list[int] = []
        for (sequence, _), emitted in zip(windows, verified, strict=True):
            if not emitted.token_ids:
                invalid.append(sequence.slot)
                continue
            tokens[sequence.slot] = emitted.token_ids
            for token_id in emitted.token_ids:
                sequence.append(token_id)
            if emitted.logprobs:
                logprobs[sequence.slot] = emitted.logprobs
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
