"""Drafts never change what is emitted, whatever they are and whenever pages run out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbraid.engine.draft_drawing import CoupledDrawing
from kvbraid.engine.drafted_decoding import DraftedDecoding
from kvbraid.engine.sequence import Source
from kvbraid.engine.speculation import SpeculationReport
from kvbraid.engine.step_plan import StepPlan
from kvbraid.engine.verification import emitted_rows
from kvbraid.kv.slots import slots_of
from kvbraid.request import FinishReason, SamplingParams
from kvbraid.speculative.break_even import PlainReason
from kvbraid.speculative.draft_plan import DraftPlan
from kvbraid.speculative.draft_policy import StepOutcome
from kvbraid.speculative.fixed_policy import FixedPolicy
from kvbraid.speculative.fused_rows import FusedRows
from kvbraid.speculative.proposal import Answer, DraftTask, Proposal, Resync
from kvbraid.transport.draft_grant import DraftGrant
from tools.scripted_engine import Script, ScriptedEngine, key_of
from tools.toy_rank import PAGE, expected, toy_token

NUM_SLOTS = 64 * PAGE
VOCAB = 1000


class Fused:
    """A fused row is the token's own id."""

    tap_layers = (0,)
    fused_width = 1

    def fuse(self, taps: Tensor) -> Tensor:
        return taps[:, 0]


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
        self.rows.take(slots, torch.tensor(tokens, dtype=torch.float32)[:, None, None])


def drafted_engine(
    drafter: ToyDrafter,
    on_report: Callable[[SpeculationReport], None] = lambda report: None,
    policy: FixedPolicy | None = None,
    **options: int,
) -> ScriptedEngine:
    rows = FusedRows(Fused(), num_slots=NUM_SLOTS, logical_page_size=PAGE, dtype=torch.float32)
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


def test_right_drafts_come_five_at_a_time_and_wrong_ones_one_by_one() -> None:
    for guess, most in ((right, 5), (wrong, 1)):
        engine = drafted_engine(ToyDrafter(guess))
        engine.submit("a", [1, 2, 3], max_tokens=21)
        engine.run(idle())
        assert engine.tokens("a") == expected([1, 2, 3], 21)
        assert max(len(e.chunk.token_ids) for e in engine.chunks("a")) == most


def test_a_sequence_whose_prompt_is_on_the_way_decodes_plainly_beside_others() -> None:
    drafter = ToyDrafter(right)
    drafter.late.add("a/0/0")
    engine = drafted_engine(drafter)

    def script() -> Script:
        engine.submit("a", [1, 2, 3], max_tokens=30)
        engine.submit("b", [4, 5], max_tokens=11)
        yield from engine.until(lambda: len(engine.tokens("b")) == 11)
        assert {task.key for task in drafter.tasks} == {"b/0/0"}
        assert len(engine.tokens("a")) < 5
        drafter.late.clear()
        yield

    engine.run(script())
    assert engine.tokens("a") == expected([1, 2, 3], 30)
    assert max(len(e.chunk.token_ids) for e in engine.chunks("a")) == 5


def test_drafts_leave_room_for_prompts_that_wait() -> None:
    engine = drafted_engine(ToyDrafter(right), max_num_batched_tokens=10)

    def script() -> Script:
        engine.submit("a", [1, 2, 3], max_tokens=150)
        engine.submit("b", [4, 5], max_tokens=150)
        yield from engine.until(lambda: engine.plans and len(engine.plans[-1].decodes) == 2)
        assert sum(len(d.drafts) for d in engine.plans[-1].decodes) == 8, "a whole step's"
        engine.submit("c", list(range(20)), max_tokens=1)
        yield from engine.until(lambda: len(engine.tokens("c")) == 1)
        assert max(len(engine.tokens(name)) for name in "ab") < 80
        yield

    engine.run(script())
    assert engine.tokens("a") == expected([1, 2, 3], 150)


def test_proposals_that_are_not_verified_are_counted_with_the_reason() -> None:
    class Narrow(FixedPolicy):
        def width(self, *args: object, **more: object) -> int:
            return 1

    for policy, num_pages, reason in (
        (FixedPolicy(4), 9, "no_room"),
        (Narrow(4), 64, "not_worthwhile"),
        (FixedPolicy(4), 64, None),
    ):
        reports: list[SpeculationReport] = []
        engine = drafted_engine(ToyDrafter(right), reports.append, policy, num_pages=num_pages)
        for name in "ab":
            engine.submit(name, [1, 2, 3], max_tokens=21)
        engine.run(idle())
        assert engine.tokens("a") == engine.tokens("b") == expected([1, 2, 3], 21)
        unverified = sum(w.num_verified == 0 for r in reports for w in r.windows)
        assert (unverified > 0) == (reason is not None)
        counted = sum((r.plain for r in reports), Counter[str]())
        assert counted == ({} if reason is None else {reason: unverified})


def test_limits_end_inside_a_window() -> None:
    engine = drafted_engine(ToyDrafter(right))
    tokens = expected([1, 2, 3], 30)
    stop = tokens[8]
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=30, stop_token_ids=(stop,))
    engine.submit("stop", [1, 2, 3], sampling=sampling)
    engine.submit("length", [1, 2, 3], max_tokens=7)
    engine.run(idle())
    assert engine.tokens("stop") == tokens[: tokens.index(stop) + 1]
    assert engine.chunks("stop")[-1].chunk.finish_reason is FinishReason.STOP
    assert engine.tokens("length") == tokens[:7]
    assert engine.chunks("length")[-1].chunk.finish_reason is FinishReason.LENGTH


def test_drafts_behind_an_accepted_stop_are_not_held_against_the_drafter() -> None:
    outcomes: list[StepOutcome] = []

    class Recording(FixedPolicy):
        def record(self, outcome: StepOutcome) -> None:
            outcomes.append(outcome)

    tokens = expected([1, 2, 3], 30)

    def right_up_to_the_stop(known: list[int], num_wanted: int) -> list[int]:
        return [t if t != tokens[9] else 999 for t in right(known, num_wanted)]

    drafter = ToyDrafter(right_up_to_the_stop)
    engine = drafted_engine(drafter, policy=Recording(drafter.max_draft_tokens))
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=30, stop_token_ids=(tokens[8],))
    engine.submit("a", [1, 2, 3], sampling=sampling)
    engine.run(idle())
    assert engine.tokens("a") == tokens[:9]
    assert [list(o.num_verified) for o in outcomes] == [[4], [3]]
    assert [list(o.num_accepted) for o in outcomes] == [[4], [3]]


def test_accepted_drafts_behind_a_stop_are_counted_nowhere() -> None:
    outcomes: list[StepOutcome] = []
    reports: list[SpeculationReport] = []

    class Recording(FixedPolicy):
        def record(self, outcome: StepOutcome) -> None:
            outcomes.append(outcome)

    drafter, tokens = ToyDrafter(right), expected([1, 2, 3], 30)
    engine = drafted_engine(drafter, reports.append, Recording(drafter.max_draft_tokens))
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=30, stop_token_ids=(tokens[7],))
    engine.submit("a", [1, 2, 3], sampling=sampling)
    engine.run(idle())
    assert engine.tokens("a") == tokens[:8]
    # Of four right drafts the second ends the sequence.
    assert [e.chunk.num_accepted for e in engine.chunks("a")] == [0, 4, 2]
    assert [list(o.num_accepted) for o in outcomes] == [[4], [2]]
    assert [list(o.num_verified) for o in outcomes] == [[4], [2]]
    assert [r.windows for r in reports] == [[(4, 4, 4)], [(4, 4, 2)]]


def test_context_limit_ends_inside_a_window() -> None:
    engine = drafted_engine(ToyDrafter(right), max_model_len=17)
    engine.submit("a", [1, 2, 3], max_tokens=100)
    engine.run(idle())
    assert engine.tokens("a") == expected([1, 2, 3], 14)


def test_a_client_turns_drafts_off_or_down() -> None:
    drafter = ToyDrafter(right)
    engine = drafted_engine(drafter)
    for name, limit in (("off", 0), ("two", 2)):
        sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=20, max_draft_tokens=limit)
        engine.submit(name, [ord(name[0])], sampling=sampling)
    engine.run(idle())
    longest = {n: max(len(e.chunk.token_ids) for e in engine.chunks(n)) for n in ("off", "two")}
    assert longest == {"off": 1, "two": 3}
    assert all(task.key.startswith("two") for task in drafter.tasks)


@pytest.mark.parametrize("bad", [(-1,), (VOCAB,), (5,) * 50, (2**40,)])
def test_ids_that_are_none_never_reach_the_model(bad: tuple[int, ...]) -> None:
    """vLLM #36906: a drafter's placeholder fed to the embedding."""
    reports: list[SpeculationReport] = []
    engine = drafted_engine(ToyDrafter(lambda tokens, n: bad), reports.append)
    engine.submit("a", [1, 2, 3], max_tokens=9)
    engine.run(idle())
    assert engine.tokens("a") == expected([1, 2, 3], 9)
    planned = [t for plan in engine.plans for d in plan.decodes for t in d.drafts]
    assert all(0 <= t < VOCAB for t in planned)
    assert sum(r.plain["bad_ids"] for r in reports) > 0


def test_no_answer_and_a_lost_drafter_cost_drafts_only() -> None:
    """Rows whose step was not answered are sent again; a drafter that forgot gets all of them."""
    drafter = ToyDrafter(right)

    def forget(task: DraftTask) -> Answer:
        drafter.known.clear()
        return Resync(0)

    drafter.answers = {2: lambda task: None, 4: forget}
    engine = drafted_engine(drafter)
    engine.submit("a", [1, 2, 3], max_tokens=40)
    engine.run(idle())
    assert engine.tokens("a") == expected([1, 2, 3], 40)
    assert drafter.tasks[2].first_position == drafter.tasks[1].first_position
    assert drafter.tasks[4].first_position == 0
    assert max(len(e.chunk.token_ids) for e in engine.chunks("a")[5:]) == 5


def test_prefix_hits_have_their_rows() -> None:
    """vLLM #47930: acceptance fell where the prompt came from the cache."""
    drafter = ToyDrafter(right)
    engine = drafted_engine(drafter)
    prompt = list(range(130))

    def script() -> Script:
        engine.submit("first", prompt, max_tokens=6)
        yield from engine.until(lambda: engine.scheduler.find(key_of("first")) is None)
        engine.submit("second", prompt, max_tokens=6)

    engine.run(script())
    assert engine.chunks("second")[0].num_cached_tokens == 128
    assert [len(e.chunk.token_ids) for e in engine.chunks("second")] == [1, 5]
    assert not any(task.starts_cold for task in drafter.tasks)


def test_rows_that_another_worker_computed_are_missing_and_the_drafter_starts_cold() -> None:
    drafter = ToyDrafter(right)
    engine = drafted_engine(drafter)

    def script() -> Script:
        engine.submit("a", [1, 2, 3], max_tokens=6, source=Source.HANDOFF)
        yield from engine.until(lambda: engine.is_granted("a"))
        engine.complete_arrival("a")
        first = toy_token([1, 2, 3])
        engine.engine.start_received(key_of("a"), engine.grant("a").transfer_id, first)

    engine.run(script())
    assert engine.tokens("a") == expected([1, 2, 3], 6)[1:]
    assert drafter.tasks[0].starts_cold
    assert drafter.tasks[0].first_position == 3


class HandedOver(ToyDrafter):
    """A prompt's rows come from the worker that computes them."""

    def open_grant(self, key: str, end_position: int) -> DraftGrant:  # type: ignore[override]
        return DraftGrant("nowhere:1", b"0" * 16, 1, key, "float32", 16)


def test_a_drafter_gets_rows_that_another_worker_pushed_when_it_drafts_and_when_it_loses_them() -> (
    None
):
    prompt = [1, 2, 3, 4, 5, 6]
    drafter = HandedOver(right)
    engine = drafted_engine(drafter)
    speculation = engine.engine._speculation
    assert isinstance(speculation, DraftedDecoding)

    def forget(task: DraftTask) -> Answer:
        drafter.known.clear()
        return Resync(0)

    def arrive(key: str, first: int, end: int) -> None:
        rows = torch.tensor(prompt[first:end], dtype=torch.float32)[:, None]
        speculation.keep_rows(key, first, rows)

    def script() -> Script:
        engine.submit("a", prompt, max_tokens=30, source=Source.HANDOFF)
        yield from engine.until(lambda: engine.is_granted("a"))
        arrive("a/0/0", 0, 4)
        arrive("a/0/0", 4, 6)
        speculation.keep_rows("of a sequence that is gone", 0, torch.zeros(3, 1))
        engine.complete_arrival("a")
        engine.engine.start_received(key_of("a"), engine.grant("a").transfer_id, toy_token(prompt))

    drafter.answers = {2: forget}
    engine.run(script())
    assert engine.tokens("a") == expected(prompt, 30)[1:]
    assert [task.first_position for task in drafter.tasks[:3]] == [0, 6, 0]
    assert not any(task.starts_cold for task in drafter.tasks)
    speculation.keep_rows("a/0/0", 0, torch.zeros(3, 1))
    assert not speculation._receiving


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    num_pages=st.integers(13, 40),
)
def test_any_drafts_in_any_pool_give_the_models_tokens(
    seed: int, lengths: list[int], num_pages: int
) -> None:
    """Preemption, prefix hits and windows that find no pages included."""
    engine = drafted_engine(ToyDrafter(mixed(seed)), num_pages=num_pages, max_num_batched_tokens=24)
    prompts = {f"{i}": [i % 3] * length for i, length in enumerate(lengths)}
    for name, prompt in prompts.items():
        engine.submit(name, prompt, max_tokens=8)
    engine.run(idle())
    for name, prompt in prompts.items():
        assert engine.tokens(name) == expected(prompt, 8)
    for plan in engine.plans:
        window = 1 + max((len(d.drafts) for d in plan.decodes), default=0)
        assert window <= 5
        assert sum(1 + len(d.drafts) for d in plan.decodes) <= 24


def test_drafts_that_find_no_pages_preempt_nobody() -> None:
    engine = drafted_engine(ToyDrafter(wrong), num_pages=1 + 4)
    # While both run, their own tokens fill the pool to the last page.
    engine.submit("a", [1] * 4, max_tokens=4)
    engine.submit("b", [2] * 4, max_tokens=11)
    engine.run(idle())
    assert engine.tokens("a") == expected([1] * 4, 4)
    assert engine.tokens("b") == expected([2] * 4, 11)
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    ("drafts", "samples", "is_valid", "num_emitted"),
    [
        ((), [7], [True], 1),
        ((), [7], [False], 0),
        ((7, 8), [7, 8, 9], [True] * 3, 3),
        ((7, 5), [7, 8, 9], [True] * 3, 2),
        ((5, 8), [7, 8, 9], [True] * 3, 1),
        ((7, 8), [7, 8, 9], [True, False, True], 1),
        ((5, 8), [7, 8, 9], [True, False, False], 1),
        ((7, 8), [7, 8, 9], [True, True, False], 2),
    ],
)
def test_emitted_rows(
    drafts: tuple[int, ...], samples: list[int], is_valid: list[bool], num_emitted: int
) -> None:
    assert emitted_rows(drafts, samples, is_valid) == num_emitted


class OffOnceOneIsPreempted(FixedPolicy):
    """And then not to be asked for long, whoever comes or goes."""

    def __init__(self) -> None:
        super().__init__(4)
        self.is_off = False

    def stays_plain(self, num_sequences: int) -> bool:
        return self.is_off

    def plan(self, slots: Seq[int], limits: Seq[int]) -> DraftPlan:
        if not self.is_off:
            return super().plan(slots, limits)
        reason = PlainReason.BELOW_BREAK_EVEN
        return DraftPlan((0,) * len(slots), 1, reason=reason, num_same=60)


def test_a_preempted_sequence_comes_back_without_its_drafts() -> None:
    """They were drafted behind a token that is no longer its newest."""
    policy = OffOnceOneIsPreempted()
    engine = drafted_engine(
        ToyDrafter(wrong), policy=policy, num_pages=16, keeps_prefixes=False, max_num_seqs=4
    )
    compute = engine.rank.compute
    drafted_while_off: list[int] = []

    def watched(plan: StepPlan) -> object:
        if policy.is_off:
            drafted_while_off.extend(len(decode.drafts) for decode in plan.decodes)
        policy.is_off = engine.scheduler.num_preemptions > 0
        return compute(plan)

    engine.rank.compute = watched  # type: ignore[method-assign,assignment]
    prompts = {"a": ([1] * 3, 55), "c": ([7] * 3, 20), "b": ([4] * 3, 40)}
    for name, (prompt, num_tokens) in prompts.items():
        engine.submit(name, prompt, max_tokens=num_tokens)
    engine.run(idle())
    for name, (prompt, num_tokens) in prompts.items():
        assert engine.tokens(name) == expected(prompt, num_tokens)
    assert policy.is_off
    assert len(drafted_while_off) > 30
    assert sum(drafted_while_off) == 0
