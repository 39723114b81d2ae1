"""The calls of one attempt under one supervision: the first failure ends the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from coordinator.clients import PrefillCall, WorkerClients
from coordinator.deadline import Deadline
from coordinator.messages import FirstToken, HandoffDone, SequenceRequest
from coordinator.router import Placement
from kvbraid.errors import UnavailableError
from kvbraid.request import TokenChunk

logger = logging.getLogger(__name__)


class Legs:
    """A decode stream, and with a handoff the prefill stream beside it. `close` ends both."""

    def __init__(
        self,
        clients: WorkerClients,
        placement: Placement,
        request: SequenceRequest,
        deadline: Deadline,
        prefill_took: Callable[[float, float], None],
    ) -> None:
        """Opens the decode stream. prefill_took gets the seconds that the prompt queued and
        computed on the prefill worker, once that has handed its KV over."""
        self._clients = clients
        self._placement = placement
        self._request = request
        self._deadline = deadline
        self._prefill_took = prefill_took
        self._decode = clients.decode(placement.decode.address).open(
            request,
            expect_handoff=placement.prefill is not None,
            timeout_s=deadline.remaining(),
        )
        self._cancel_prefill: Callable[[], None] = lambda: None
        self._prefill_task: asyncio.Task[None] | None = None
        self._start_task: asyncio.Task[None] | None = None
        self._next: asyncio.Task[TokenChunk | None] | None = None
        self._first: asyncio.Future[TokenChunk] = asyncio.get_running_loop().create_future()
        self._num_cached_tokens = 0
        self._is_decoding = False
        self._has_failed = False
        self.blames_prefill = False
        """Whether the first failure was the prefill worker's."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the worker which ran the prompt did not compute."""
        if self._placement.prefill is None:
            return self._decode.num_cached_tokens
        return self._num_cached_tokens

    async def wait_granted(self) -> None:
        """Returns when the decode worker has pages for the prompt."""
        self._grant = await self._decode.grant()

    async def first_token(self) -> TokenChunk:
        """Runs the prompt on the prefill worker and returns its first token, which the decode
        worker is told at the same time. Needs `wait_granted` and a placement with prefill."""
        assert self._placement.prefill is not None
        client = self._clients.prefill(self._placement.prefill.address)
        prefill = client.open(self._request, self._grant, timeout_s=self._deadline.remaining())
        self._cancel_prefill = prefill.cancel
        self._prefill_task = self._supervise(self._follow_prefill(prefill))
        self._next = self._supervise(self._decode.read())
        first = await self._first
        if first.finish_reason is None:
            start = self._decode.start(
                self._grant, first.token_ids[-1], timeout_s=self._deadline.remaining()
            )
            self._start_task = self._supervise(start)
        return first

    async def decode_chunks(self) -> AsyncIterator[TokenChunk]:
        """The decode worker's tokens. Raises the first failure of any leg."""
        while True:
            chunk = await (self._next or self._decode.read())
            self._next = None
            if chunk is None:
                return
            # Tokens mean that every row is there: the prefill side may end as it likes.
            self._is_decoding = True
            yield chunk

    async def close(self) -> None:
        """Cancels what still runs; the workers free what the request held."""
        self._has_failed = True
        self._decode.cancel()
        # Its reader may be between two messages, where ending the reader would not end the call.
        self._cancel_prefill()
        tasks: list[asyncio.Task[Any] | None] = [self._prefill_task, self._start_task, self._next]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._first.done() and not self._first.cancelled():
            # Nobody may have waited for it; asyncio would complain of an error never seen.
            self._first.exception()

    async def _follow_prefill(self, prefill: PrefillCall) -> None:
        async for event in prefill.events():
            if isinstance(event, FirstToken) and not self._first.done():
                self._num_cached_tokens = event.num_cached_tokens
                self._first.set_result(event.chunk)
            elif isinstance(event, HandoffDone):
                self._prefill_took(event.queue_s, event.compute_s)
        if not self._first.done():
            raise UnavailableError(f"{prefill.peer}: ended without a first token")

    def _supervise(self, leg: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(leg)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, leg: asyncio.Task[Any]) -> None:
        if leg.cancelled():
            return
        error = leg.exception()
        if error is None and leg is self._next and leg.result() is None:
            error = UnavailableError("the decode worker ended its stream without a token")
        if error is None or self._has_failed:
            return
        if self._is_decoding:
            logger.info("ignored after the handoff: %s", error)
            return
        self._has_failed = True
        self.blames_prefill = leg is self._prefill_task
        if not self._first.done():
            self._first.set_exception(error)
        self._decode.end(error)
