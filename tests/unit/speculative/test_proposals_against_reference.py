"""Every form of EAGLE3 and DSpark against the float64 reference: ragged batches, many steps."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from kvbraid.speculative.draft_sampler import DraftSampler
from kvbraid.speculative.drafter_config import AnyDrafterConfig
from tests.unit.speculative.drafters.random_drafters import (
    DSPARK_FORMS,
    EAGLE3_FORMS,
    random_drafter,
)
from tests.unit.speculative.drafters.streams import (
    Stream,
    check,
    expected,
    poisoned,
    random_stream,
)

FORMS = {f"eagle3-{name}": config for name, config in EAGLE3_FORMS.items()} | {
    f"dspark-{name}": config for name, config in DSPARK_FORMS.items()
}
every_form = pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
BOTH = {name: FORMS[name] for name in ("eagle3-gqa", "eagle3-mla", "dspark-vanilla", "dspark-mla")}
both_kinds = pytest.mark.parametrize("config", BOTH.values(), ids=BOTH)


@pytest.fixture(autouse=True)
def _single_thread() -> None:
    torch.set_num_threads(1)


def streams_of(config: AnyDrafterConfig, count: int, length: int = 90) -> list[Stream]:
    return [random_stream(f"s{i}", length, config.hidden_size, 10 + i) for i in range(count)]


@every_form
def test_ragged_steps_with_random_accepted_lengths(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter)
    streams = streams_of(config, 4)
    draw = random.Random(3)
    prompts = (1, 30, 17, 5)
    for round_number in range(6):
        joining = streams[: round_number + 2]
        draw.shuffle(joining)
        tasks, wanted = [], []
        for stream in joining:
            is_new = stream.committed == 0
            more = prompts[streams.index(stream)] if is_new else draw.randint(1, 6)
            wanted.append(draw.choice((0, 1, config.max_draft_tokens, config.max_draft_tokens + 2)))
            tasks.append(stream.task(stream.committed + more, wanted[-1]))
        answers = proposer.step(tasks)
        for stream, num_drafts, answer in zip(joining, wanted, answers, strict=True):
            drafts = expected(drafter, stream, num_drafts)
            assert len(drafts.token_ids) == min(num_drafts, config.max_draft_tokens)
            check(answer, drafts)


@every_form
def test_logits_equal_the_reference(
    config: AnyDrafterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    choose = DraftSampler.choose

    def spy(self: DraftSampler, scores: torch.Tensor, draft: int) -> torch.Tensor:
        seen.append(scores.clone())
        return choose(self, scores, draft)

    monkeypatch.setattr(DraftSampler, "choose", spy)
    drafter = random_drafter(config, seed=1)
    proposer = poisoned(drafter)
    streams = streams_of(config, 2)
    num_drafts = config.max_draft_tokens
    proposer.step([streams[0].task(19, num_drafts), streams[1].task(3, num_drafts)])
    references = [expected(drafter, stream, num_drafts).logits for stream in streams]
    assert len(seen) == num_drafts
    for draft, scores in enumerate(seen):
        for row, logits in enumerate(references):
            torch.testing.assert_close(scores[row].double(), logits[draft], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@both_kinds
def test_page_sizes_and_chunked_prompts(config: AnyDrafterConfig, page_size: int) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter, page_size=page_size)
    streams = streams_of(config, 3)
    chunks = ((0, 7, 8, 40, 41), (0, 16, 32, 33, 36), (0, 1, 2, 3, 50))
    for step in range(4):
        tasks = []
        for stream, bounds in zip(streams, chunks, strict=True):
            _, end = list(pairwise(bounds))[step]
            # Prompts are ingested first and drafted for in the last two steps.
            tasks.append(stream.task(end, 4 if step > 1 else 0))
        answers = proposer.step(tasks)
        for stream, answer in zip(streams, answers, strict=True):
            check(answer, expected(drafter, stream, 4 if step > 1 else 0))


@both_kinds
def test_a_tied_targets_embedding_is_the_head_where_there_is_no_other(
    config: AnyDrafterConfig,
) -> None:
    drafter = random_drafter(config, is_target_tied=True)
    stream = streams_of(config, 1)[0]
    (answer,) = poisoned(drafter).step([stream.task(12, 3)])
    check(answer, expected(drafter, stream, 3))


@both_kinds
def test_a_cold_start_keeps_absolute_positions(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter)
    stream = streams_of(config, 1)[0]
    (answer,) = proposer.step([stream.task(45, 4, first=40, starts_cold=True)])
    check(answer, expected(drafter, stream, 4))
    (answer,) = proposer.step([stream.task(48, 4)])
    assert stream.base == 40
    check(answer, expected(drafter, stream, 4))


@both_kinds
def test_rows_sent_again_replace_what_was_held(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter)
    stream = streams_of(config, 1)[0]
    proposer.step([stream.task(33, 4)])
    stream.rows[21:] = stream.rows[21:].flip(0)
    stream.token_ids[22:] = reversed(stream.token_ids[22:])
    task = stream.task(25, 4, first=21)
    answers = [proposer.step([task])[0] for _ in range(2)]
    assert answers[0] == answers[1], "the same step twice"
    check(answers[0], expected(drafter, stream, 4))


@both_kinds
def test_a_step_without_rows_proposes_from_what_is_held(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter)
    stream, other = streams_of(config, 2)
    proposer.step([stream.task(20, 0)])
    for anchor in (7, 9):
        stream.token_ids[20] = anchor
        answers = proposer.step([stream.task(20, 4), other.task(other.committed + 4, 4)])
        check(answers[0], expected(drafter, stream, 4))
        check(answers[1], expected(drafter, other, 4))
    (answer,) = proposer.step([stream.task(22, 4)])
    check(answer, expected(drafter, stream, 4))


@both_kinds
def test_a_proposal_does_not_depend_on_the_rest_of_its_batch(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    alone, together = poisoned(drafter), poisoned(drafter)
    streams = streams_of(config, 4)
    lengths = (33, 2, 64, 18)
    tasks = [s.task(length, 4) for s, length in zip(streams, lengths, strict=True)]
    answers = [alone.step([task])[0] for task in tasks]
    for task, answer, batched in zip(tasks, answers, together.step(tasks), strict=True):
        assert batched.token_ids == answer.token_ids, task.key
