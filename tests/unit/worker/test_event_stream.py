"""Tokens that nobody has taken yet are told together."""

from __future__ import annotations

import asyncio

import pytest

from kvbraid.engine.events import EngineEvent, RequestFailed, RowsReceived, TokensReady
from kvbraid.engine.sequence import SequenceKey
from kvbraid.errors import UnavailableError
from kvbraid.request import DraftWindow, FinishReason, PositionLogprobs, TokenChunk, TokenLogprob
from kvbraid.worker.request_streams import EventStream

KEY = SequenceKey("r", 0, 0)


def tokens(
    *token_ids: int,
    finish_reason: FinishReason | None = None,
    windows: tuple[DraftWindow, ...] = (),
) -> TokensReady:
    logprobs = tuple(
        PositionLogprobs(TokenLogprob(token_id, -0.5 * token_id), ()) for token_id in token_ids
    )
    return TokensReady(KEY, TokenChunk(token_ids, logprobs, finish_reason, windows), 3)


async def taken(*events: EngineEvent) -> list[EngineEvent]:
    stream = EventStream()
    for event in events:
        stream.put(event)
    return [event async for event in stream]


async def test_waiting_tokens_are_one_event_with_everything_that_they_had() -> None:
    found = await taken(tokens(1), tokens(2), tokens(3, finish_reason=FinishReason.LENGTH))
    assert found == [tokens(1, 2, 3, finish_reason=FinishReason.LENGTH)]


async def test_each_step_keeps_what_it_verified() -> None:
    plain, verified = DraftWindow(0, 0), DraftWindow(4, 1)
    found = await taken(
        tokens(1),
        tokens(2, 3, windows=(verified,)),
        tokens(4, finish_reason=FinishReason.LENGTH),
    )
    windows = (plain, verified, plain)
    assert found == [tokens(1, 2, 3, 4, finish_reason=FinishReason.LENGTH, windows=windows)]


async def test_what_was_taken_is_not_told_again() -> None:
    stream = EventStream()
    stream.put(tokens(1))
    assert await stream.next() == tokens(1)
    stream.put(tokens(2))
    stream.put(tokens(3, finish_reason=FinishReason.STOP))
    assert await stream.next() == tokens(2, 3, finish_reason=FinishReason.STOP)
    assert stream.is_finished


async def test_whoever_waits_gets_the_next_event_at_once() -> None:
    stream = EventStream()
    waiting = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    stream.put(tokens(1))
    assert await waiting == tokens(1)
    waiting = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.put(tokens(2))
    assert await waiting == tokens(2)


@pytest.mark.parametrize(
    "events",
    [
        (tokens(1), RowsReceived(KEY, 8, 0.1), tokens(2)),
        (tokens(1), tokens(finish_reason=FinishReason.ABORT)),
    ],
    ids=["something between", "aborted"],
)
async def test_events_that_are_told_apart(events: tuple[EngineEvent, ...]) -> None:
    stream = EventStream()
    for event in events:
        stream.put(event)
    assert [await stream.next() for _ in events] == list(events)


async def test_tokens_before_an_error_are_not_lost() -> None:
    stream = EventStream()
    for event in (tokens(1), tokens(2), RequestFailed(KEY, UnavailableError("gone"))):
        stream.put(event)
    assert await stream.next() == tokens(1, 2)
    with pytest.raises(UnavailableError, match="gone"):
        await stream.next()
