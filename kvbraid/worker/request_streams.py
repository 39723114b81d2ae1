"""Between servicers (asyncio) and the engine thread: one stream of events a running sequence."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbraid.engine.engine import Engine
from kvbraid.engine.events import EngineEvent, PromptSent, RequestFailed, TokensReady
from kvbraid.engine.sequence import EngineRequest, SequenceKey
from kvbraid.errors import InvalidRequestError

logger = logging.getLogger(__name__)


class EventStream:
    """Events of one sequence in order; ends after the last one."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[EngineEvent] = asyncio.Queue()
        self.is_finished = False

    def put(self, event: EngineEvent) -> None:
        """From the event loop."""
        self._events.put_nowait(event)

    async def next(self) -> EngineEvent:
        """The next event. Raises the sequence's error when it failed."""
        event = await self._events.get()
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


class RequestStreams:
    """Opens sequences on the engine and frees them whatever happens to the caller."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: dict[SequenceKey, EventStream] = {}
        self._engine: Engine | None = None
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
        self._loop.call_soon_threadsafe(self._route, event)

    def _route(self, event: EngineEvent) -> None:
        stream = self._streams.get(event.key)
        if stream is not None:
            stream.put(event)

    @asynccontextmanager
    async def open(self, request: EngineRequest) -> AsyncIterator[EventStream]:
        """Run `request`; leaving the block before its last event aborts it and waits until its
        pages are out of every writer's reach.

        Raises InvalidRequestError when the same completion of the same attempt runs already.
        """
        if request.key in self._streams:
            raise InvalidRequestError(f"request {request.key} is running already", field="ref")
        stream = self._streams[request.key] = EventStream()
        try:
            self.engine.submit(request)
            yield stream
        finally:
            if not stream.is_finished:
                await asyncio.shield(self.abort(request.key))
            del self._streams[request.key]

    async def abort(self, key: SequenceKey) -> bool:
        """End a sequence; returns, once its pages are free, whether there was one."""
        began = time.monotonic()
        found: asyncio.Future[bool] = self._loop.create_future()

        def done(was_found: bool) -> None:
            self._loop.call_soon_threadsafe(_resolve, found, was_found)

        self.engine.abort(key, done)
        was_found = await found
        if was_found:
            self.on_cancel_to_free(time.monotonic() - began)
        return was_found

    async def report_rows(self) -> NDArray[np.int64]:
        """[tp_size, 2] int64: finite pool rows and pool bytes of every rank."""
        rows: asyncio.Future[NDArray[np.int64]] = self._loop.create_future()

        def done(values: NDArray[np.int64]) -> None:
            self._loop.call_soon_threadsafe(_resolve, rows, values)

        self.engine.report_rows(done)
        return await rows


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
