"""What a completion emits and asks for, attempt by attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.completion import Completion
from kvbraid.errors import RequestCancelledError
from kvbraid.request import (
    DraftWindow,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
)
from kvbraid.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(Path(__file__).parents[2] / "assets" / "tiny-mla")
WORDS = TOKENIZER.encode("One fish, two fish, red fish.", add_special_tokens=False)


def completion(**sampling: Any) -> Completion:
    params = SamplingParams(**{"max_tokens": 50, "seed": 3, **sampling})
    return Completion(GenerateRequest("r", (5, 6, 7), params), 1, TOKENIZER)


def chunk(*token_ids: int, reason: FinishReason | None = None) -> TokenChunk:
    return TokenChunk(token_ids, (), reason)


def test_a_retry_asks_for_what_is_left() -> None:
    running = completion(stop=("x",), n=4, min_tokens=9)
    running.add(chunk(*WORDS[:3]), 0, 0)
    work = running.next_request(2, incarnation=77)
    assert work.token_ids == (5, 6, 7, *WORDS[:3])
    assert work.num_prompt_tokens == 3
    assert (work.sampling.max_tokens, work.sampling.min_tokens) == (47, 9)
    assert (work.sampling.stop, work.sampling.n, work.sampling.seed) == ((), 1, 3)
    assert (work.ref.attempt, work.ref.sender_incarnation, work.index) == (2, 77, 1)


def test_usage_comes_with_the_last_delta() -> None:
    running = completion()
    assert running.add(chunk(*WORDS[:3]), 0, 2).usage is None
    last = running.add(chunk(WORDS[3], reason=FinishReason.LENGTH), 0, 2)
    assert last.usage is not None
    assert last.usage.num_prompt_tokens == 3
    assert last.usage.num_completion_tokens == 4
    assert last.usage.num_cached_tokens == 2
    assert running.is_finished


def test_cached_tokens_are_those_of_the_attempt_that_answered_first() -> None:
    running = completion()
    running.add(chunk(WORDS[0]), 1, 0)
    running.add(chunk(WORDS[1]), 1, 1)
    last = running.add(chunk(WORDS[2], reason=FinishReason.LENGTH), 2, 3)
    assert last.usage is not None
    assert last.usage.num_cached_tokens == 1


def test_tokens_behind_a_stop_string_are_dropped() -> None:
    running = completion(stop=("two",))
    delta = running.add(chunk(*WORDS), 0, 0)
    assert delta.text == "One fish, "
    assert delta.chunk.finish_reason is FinishReason.STOP
    assert TOKENIZER.decode(delta.chunk.token_ids).endswith("two")
    assert running.emitted == list(delta.chunk.token_ids)


@pytest.mark.parametrize(
    ("num_accepted", "num_counted"),
    [(len(WORDS) - 1, 4), (4, 4), (2, 2)],
    ids=["drafts behind it", "the last token is a draft", "no draft behind it"],
)
def test_drafts_behind_a_stop_string_came_true_for_nobody(
    num_accepted: int, num_counted: int
) -> None:
    running = completion(stop=("two",))
    window = DraftWindow(len(WORDS) + 2, num_accepted)
    delta = running.add(TokenChunk(tuple(WORDS), windows=(window,)), 0, 0)
    assert len(delta.chunk.token_ids) == 4
    assert delta.chunk.num_accepted == num_counted
    assert delta.usage is not None
    assert delta.usage.num_accepted_tokens == num_counted
    assert delta.usage.num_draft_tokens == len(WORDS) + 2


def test_logprobs_are_cut_with_their_tokens() -> None:
    running = completion(max_tokens=2)
    entries = tuple(PositionLogprobs(TokenLogprob(t, -1.0), ()) for t in WORDS)
    delta = running.add(TokenChunk(tuple(WORDS), entries), 0, 0)
    assert delta.chunk.logprobs == entries[:2]
    assert delta.chunk.finish_reason is FinishReason.LENGTH


def test_a_stop_token_has_no_text_but_is_counted() -> None:
    running = completion(stop_token_ids=(WORDS[2],))
    delta = running.add(chunk(*WORDS[:3], reason=FinishReason.STOP), 0, 0)
    assert delta.text == TOKENIZER.decode(WORDS[:2])
    assert delta.chunk.token_ids == tuple(WORDS[:3])
    assert delta.usage is not None
    assert delta.usage.num_completion_tokens == 3


def test_the_last_token_at_max_tokens_keeps_its_text_even_if_it_is_a_stop_token() -> None:
    running = completion(stop_token_ids=(WORDS[0],), min_tokens=5)
    assert running.add(chunk(WORDS[0]), 0, 0).text == TOKENIZER.decode(WORDS[:1])


def test_withheld_text_is_released_at_the_end() -> None:
    running = completion(stop=("fish, red bird",))
    pieces = [running.add(chunk(token), 0, 0).text for token in WORDS[:-1]]
    last = running.add(chunk(WORDS[-1], reason=FinishReason.LENGTH), 0, 0)
    assert "".join(pieces) + last.text == "One fish, two fish, red fish."


def test_an_aborted_generation_is_no_finished_one() -> None:
    with pytest.raises(RequestCancelledError):
        completion().add(chunk(reason=FinishReason.ABORT), 0, 0)
