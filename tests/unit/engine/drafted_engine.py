"""A scripted engine whose drafter knows the tokens that it is told."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from random import Random

import numpy as np
import torch

from kvbraid.engine.draft_drawing import CoupledDrawing
from kvbraid.engine.drafted_decoding import DraftedDecoding
from kvbraid.engine.speculation import SpeculationReport
from kvbraid.engine.step_plan import StepPlan
from kvbraid.kv.slots import slots_of
from kvbraid.speculative.fixed_policy import FixedPolicy
from kvbraid.speculative.fused_rows import FusedRows
from kvbraid.speculative.proposal import Answer, DraftTask, Proposal, Resync
from tools.scripted_engine import Script, ScriptedEngine
from tools.toy_rank import PAGE, expected, toy_token

NUM_SLOTS = 64 * PAGE
VOCAB = 1000


class ToyDrafter:
    """Keeps, for each key, the tokens that rows and next tokens tell; drafts with `guess`.

    A row holds its token, so a row of the wrong sequence or position is noticed.
    """

    max_draft_tokens = 4

    def __init__(self, guess: Callable[[list[int], int], Seq[int]]) -> None:
        self.guess = guess
        self.known: dict[str, list[int | None]] = {}
        self.tasks: list[DraftTask] = []
        self.answers: dict[int, Callable[[DraftTask], Answer | None]] = {}
        self.late: set[str] = set()

    def open_grant(self, key: str, end_position: int) -> None:
        return None

    def take_rows(self) -> None:
        pass

    def await_rows(self, keys: Seq[str]) -> Collection[str]:
        return [key for key in keys if key in self.late]

    def step(self, tasks: Seq[DraftTask]) -> list[Answer | None]:
        answers: list[Answer | None] = []
        for task in tasks:
            self.tasks.append(task)
            override = self.answers.pop(len(self.tasks), None)
            answers.append(self._answer(task) if override is None else override(task))
        return answers

    def drop(self, key: str) -> None:
        self.known.pop(key, None)

    def _answer(self, task: DraftTask) -> Answer:
        held = self.known.setdefault(task.key, [])
        if task.starts_cold:
            held[:] = [None] * task.first_position
        if task.first_position > len(held):
            return Resync(len(held))
        del held[task.first_position :]
        held += [int(row) for row in task.rows[:, 0]]
        assert len(held) == task.anchor_position
        assert held[task.first_position + 1 :] == list(task.next_token_ids[:-1])
        if None in held:
            return Proposal()
        tokens = [*(t for t in held if t is not None), task.anchor_id]
        return Proposal(tuple(self.guess(tokens, task.num_wanted)))


class RowKeeper:
    """Gives FusedRows the rows of every token that the toy rank computes."""

    def __init__(self, engine: ScriptedEngine, rows: FusedRows) -> None:
        self.engine = engine
        self.rows = rows
        execute = engine.rank.compute

        def compute(plan: StepPlan) -> object:
            self._take(plan)
            return execute(plan)

        engine.rank.compute = compute  # type: ignore[method-assign,assignment]

    def _take(self, plan: StepPlan) -> None:
        for operation in plan.operations:
            pages = getattr(operation, "pages", ())
            self.rows.renew(pages[getattr(operation, "num_computed", 0) // PAGE :])
        if not plan.taps:
            return
        for decode in plan.decodes:
            held = self.engine.rank.slots[decode.slot]
            newest = len(held.token_ids) - 1
            self._keep(held.pages, newest, [held.token_ids[newest], *decode.drafts])
        for extend in plan.extends:
            held = self.engine.rank.slots[extend.slot]
            end = extend.start + extend.length
            self._keep(held.pages, extend.start, held.token_ids[extend.start : end])

    def _keep(self, pages: Seq[int], start: int, tokens: Seq[int]) -> None:
        slots = slots_of(pages, np.arange(start, start + len(tokens)), PAGE)
        # A fused row is the token's own id.
        self.rows.take(slots, torch.tensor(tokens, dtype=torch.float32)[:, None])


def drafted_engine(
    drafter: ToyDrafter,
    on_report: Callable[[SpeculationReport], None] = lambda report: None,
    policy: FixedPolicy | None = None,
    **options: int,
) -> ScriptedEngine:
    rows = FusedRows(1, num_slots=NUM_SLOTS, logical_page_size=PAGE, dtype=torch.float32)
    speculation = DraftedDecoding(
        drafter, rows, policy or FixedPolicy(drafter.max_draft_tokens), CoupledDrawing(),
        logical_page_size=PAGE,
        max_model_len=options.get("max_model_len", 250), vocab_size=VOCAB, on_report=on_report,
    )  # fmt: skip
    engine = ScriptedEngine(speculation=speculation, **options)  # type: ignore[arg-type]
    RowKeeper(engine, rows)
    return engine


def right(tokens: list[int], num_wanted: int) -> list[int]:
    return expected(tokens, num_wanted)


def wrong(tokens: list[int], num_wanted: int) -> list[int]:
    return [(toy_token(tokens) + 1) % VOCAB] * num_wanted


def mixed(seed: int) -> Callable[[list[int], int], list[int]]:
    random = Random(seed)

    def guess(tokens: list[int], num_wanted: int) -> list[int]:
        drafts = right(tokens, num_wanted)
        return [t if random.random() < 0.7 else random.randrange(VOCAB) for t in drafts][
            : random.randrange(num_wanted + 1)
        ]

    return guess


def idle() -> Script:
    yield from ()
