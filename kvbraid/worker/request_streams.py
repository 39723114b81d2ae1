"""Between servicers (asyncio) and the engine thread: one stream of events a running sequence."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvbraid.engine.engine import Engine
from kvbraid.engine.events import EngineEvent, PromptSent, RequestFailed, TokensReady
from kvbraid.engine.sequence import EngineRequest, SequenceKey
from kvbraid.errors import InvalidRequestError, KVBraidError, UnavailableError
from kvbraid.request import FinishReason

T = TypeVar("T")


class EventStream:
    """Events of one sequence in order; ends after the last one.

    Tokens that nobody has taken yet are one event: whoever cannot send a message for every step
    sends fewer and longer ones, and does not fall behind further.
    """

    def __init__(self) -> None:
        self._events: deque[EngineEvent] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.is_finished = False
        self.has_failed = False
        """Whether an error was put, which no event after it reaches anybody."""

    def put(self, event: EngineEvent) -> None:
        """From the event loop."""
        self.has_failed |= isinstance(event, RequestFailed)
        if self._events and (joined := _joined(self._events[-1], event)) is not None:
            self._events[-1] = joined
        else:
            self._events.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> EngineEvent:
        """The next event, for one reader. Raises the sequence's error when it failed."""
        if not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        event = self._events.popleft()
        if isinstance(event, RequestFailed):
            self.is_finished = True
            raise event.error
        if isinstance(event, PromptSent) or (
            isinstance(event, TokensReady) and event.chunk.finish_reason is not None
        ):
            self.is_finished = True
        return event

    async def __aiter__(self) -> AsyncIterator[EngineEvent]:
        while not self.is_finished:
            yield await self.next()


def _joined(earlier: EngineEvent, later: EngineEvent) -> TokensReady | None:
    """Both as one event; None where they must be told apart."""
    if not isinstance(earlier, TokensReady) or not isinstance(later, TokensReady):
        return None
    if later.chunk.finish_reason is FinishReason.ABORT:  # which says nothing of earlier tokens
        return None
    return replace(later, chunk=earlier.chunk.followed_by(later.chunk))


class RequestStreams:
    """Opens sequences on the engine and frees them whatever happens to the caller."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[EngineEvent] = deque()
        self._streams: dict[SequenceKey, EventStream] = {}
        self._engine: Engine | None = None
        self._answers: set[asyncio.Future[Any]] = set()
        self._has_ended = False
        self.on_cancel_to_free: Callable[[float], None] = lambda seconds: None

    def attach(self, engine: Engine) -> None:
        """The engine whose events arrive through `deliver`."""
        self._engine = engine

    @property
    def engine(self) -> Engine:
        """The attached engine."""
        assert self._engine is not None, "no engine attached yet"
        return self._engine

    def deliver(self, event: EngineEvent) -> None:
        """The engine's event sink; called in the engine thread."""
        self._events.append(event)
        # One wake-up takes everything that has come until it runs: a step gives many events.
        if len(self._events) == 1:
            self._loop.call_soon_threadsafe(self._route)

    def _route(self) -> None:
        while self._events:
            event = self._events[0]
            stream = self._streams.get(event.key)
            if stream is not None:
                stream.put(event)
            # Taken off only now: while one is here, no further wake-up is needed.
            self._events.popleft()

    def give_up(self, error: KVBraidError) -> None:
        """End every stream and question with `error`, since the engine is stuck; should it get on
        after all, it frees what they held. From the event loop."""
        for key, stream in self._streams.items():
            if not stream.has_failed:
                stream.put(RequestFailed(key, error))
                self.engine.abort(key, lambda was_found: None)
        self._fail_answers(error)

    def end(self) -> None:
        """The engine runs no more: nobody is to wait for it. From the event loop."""
        self._has_ended = True
        for key, stream in self._streams.items():
            stream.put(RequestFailed(key, _engine_is_gone()))
        self._fail_answers(_engine_is_gone())

    def _fail_answers(self, error: KVBraidError) -> None:
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(error)

    @contextlib.asynccontextmanager
    async def open(self, request: EngineRequest) -> AsyncIterator[EventStream]:
        """Run `request`; leaving the block before its last event aborts it and waits until its
        pages are out of every writer's reach.

        Raises InvalidRequestError when the same completion of the same attempt runs already,
        UnavailableError when the engine has ended.
        """
        if self._has_ended:
            raise _engine_is_gone()
        if request.key in self._streams:
            raise InvalidRequestError(f"request {request.key} is running already", field="ref")
        stream = self._streams[request.key] = EventStream()
        try:
            self.engine.submit(request)
            yield stream
        finally:
            try:
                if not stream.is_finished:
                    with contextlib.suppress(UnavailableError):  # what ended the block counts
                        await asyncio.shield(self.abort(request.key))
            finally:
                del self._streams[request.key]

    async def abort(self, key: SequenceKey) -> bool:
        """End a sequence; returns, once its pages are free, whether there was one.

        Raises UnavailableError when the engine ends first or is stuck.
        """
        began = time.monotonic()

        def question(done: Callable[[bool], None]) -> None:
            self.engine.abort(key, done)

        was_found = await self._ask(question)
        if was_found:
            self.on_cancel_to_free(time.monotonic() - began)
        return was_found

    async def report_rows(self) -> NDArray[np.int64]:
        """[tp_size, 2] int64: finite pool rows and pool bytes of every rank.

        Raises UnavailableError when the engine ends first or is stuck.
        """
        return await self._ask(self.engine.report_rows)

    async def _ask(self, question: Callable[[Callable[[T], None]], None]) -> T:
        """What the engine thread answers through the callback that `question` gives it."""
        if self._has_ended:
            raise _engine_is_gone()
        answer: asyncio.Future[T] = self._loop.create_future()

        def done(value: T) -> None:
            self._loop.call_soon_threadsafe(_resolve, answer, value)

        self._answers.add(answer)
        try:
            question(done)
            return await answer
        finally:
            self._answers.discard(answer)


def _engine_is_gone() -> UnavailableError:
    return UnavailableError("the engine of this worker has ended")


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
