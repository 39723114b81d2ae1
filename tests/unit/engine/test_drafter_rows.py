"""Where the rows of a prompt come from that a drafter needs before it drafts."""

from __future__ import annotations

import torch

from kvbraid.engine.drafted_decoding import DraftedDecoding
from kvbraid.engine.sequence import Source
from kvbraid.speculative.proposal import Answer, DraftTask, Resync
from kvbraid.transport.draft_grant import DraftGrant
from tests.unit.engine.drafted_engine import ToyDrafter, drafted_engine, right
from tools.scripted_engine import Script, key_of
from tools.toy_rank import expected, toy_token


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
