"""Pushes fused rows of prompts to draft services while the prompts are computed.

The engine thread hands rows over without waiting (`begin`, `push`, `finish`); the I/O loop pushes
them. Whatever goes wrong is counted and costs acceptance, never the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from kvbraid.errors import KVBraidError, OverloadedError, UnavailableError
from kvbraid.telemetry.speculation_metrics import SpeculationMetrics
from kvbraid.transport.draft_grant import DraftGrant
from kvbraid.transport.grpc_push import ChannelFactory
from kvbraid.transport.ingest_call import IngestCall, IngestChunk, ingest_chunks

logger = logging.getLogger(__name__)


class RowPusher:
    """Prompts whose rows leave this worker. `start` and `stop` are the I/O loop's, everything else
    is the engine thread's.

    channels: the channel to an address, which its owner closes after `stop`. drafter_digest,
    hidden_size: of the fc that makes the rows. max_queued_bytes: rows that may wait for the
    network, over all prompts; a prompt whose rows find no room is given up. timeout_s: no prompt
    is pushed for longer.
    """

    def __init__(
        self,
        *,
        channels: ChannelFactory,
        drafter_digest: str,
        hidden_size: int,
        metrics: SpeculationMetrics,
        max_queued_bytes: int = 64 << 20,
        timeout_s: float = 600.0,
    ) -> None:
        self._channels = channels
        self._drafter_digest = drafter_digest
        self._hidden_size = hidden_size
        self._metrics = metrics
        self._max_queued_bytes = max_queued_bytes
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._prompts: dict[bytes, _Prompt] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # I/O loop

    def start(self) -> None:
        """Push from the running loop; to be called before the first `begin`."""
        self._loop = asyncio.get_running_loop()

    async def stop(self) -> None:
        """Give every prompt up."""
        self._loop = None
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # Engine thread

    def begin(self, grant: DraftGrant) -> None:
        """A prompt whose rows will be pushed. ValueError for one that has begun already."""
        if grant.transfer_id in self._prompts:
            raise ValueError(f"transfer {grant.transfer_id.hex()} has begun already")
        prompt = self._prompts[grant.transfer_id] = _Prompt(grant)
        self._post(self._start, prompt)

    def push(
        self,
        transfer_id: bytes,
        first_position: int,
        rows: Tensor,
        next_token_ids: Sequence[int],
        *,
        starts_cold: bool = False,
    ) -> None:
        """Rows [m, d] of the positions from `first_position`, each with the token at its position
        + 1; copied before this returns. They follow on those pushed before; starts_cold: rows
        before the first ones will never come. Unknown ids, finished and given up, are ignored.
        """
        prompt = self._prompts.get(transfer_id)
        if prompt is None or prompt.failure is not None or not rows.shape[0]:
            return
        chunks = ingest_chunks(
            prompt.grant, first_position, rows, next_token_ids, starts_cold=starts_cold
        )
        num_bytes = sum(chunk.num_bytes for chunk in chunks)
        with self._lock:
            has_room = self._queued_bytes + num_bytes <= self._max_queued_bytes
            self._queued_bytes += num_bytes if has_room else 0
        if not has_room:
            prompt.failure = OverloadedError(f"{self._queued_bytes} bytes of rows wait already")
            self._post(self._give_up, prompt)
            return
        self._post(self._take, prompt, chunks)

    def finish(self, transfer_id: bytes) -> None:
        """No more rows will come. Unknown ids are ignored."""
        prompt = self._prompts.pop(transfer_id, None)
        if prompt is not None:
            self._post(self._take, prompt, [None])

    def cancel(self, transfer_id: bytes) -> None:
        """The prompt was given up: push nothing more. Unknown ids are ignored."""
        prompt = self._prompts.pop(transfer_id, None)
        if prompt is not None:
            self._post(self._give_up, prompt)

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        loop = self._loop
        if loop is not None:
            # The loop closes before the engine thread stops; then nobody is left to push.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(callback, *arguments)

    # I/O loop

    def _start(self, prompt: _Prompt) -> None:
        if self._loop is None:
            return
        prompt.task = self._loop.create_task(self._push_all(prompt))
        self._tasks.add(prompt.task)
        prompt.task.add_done_callback(lambda task: self._ended(prompt, task))

    def _take(self, prompt: _Prompt, chunks: Sequence[IngestChunk | None]) -> None:
        if prompt.task is None or prompt.task.done():
            self._release(sum(chunk.num_bytes for chunk in chunks if chunk is not None))
            return
        for chunk in chunks:
            prompt.chunks.put_nowait(chunk)
        num_rows = sum(chunk.num_rows for chunk in chunks if chunk is not None)
        prompt.num_rows += num_rows
        self._metrics.unacknowledged_rows.inc(num_rows)

    def _give_up(self, prompt: _Prompt) -> None:
        if prompt.task is not None:
            prompt.task.cancel()

    def _ended(self, prompt: _Prompt, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._release(prompt.take_all())
        self._metrics.unacknowledged_rows.dec(prompt.num_rows)
        error = prompt.failure
        if not task.cancelled() and task.exception() is not None:
            found = task.exception()
            error = found if isinstance(found, KVBraidError) else UnavailableError(repr(found))
        if error is not None:
            prompt.failure = error
            self._metrics.push_failures_total.labels(reason=error.reason).inc()
            logger.warning("rows of %s did not get to the drafter: %s", prompt.grant.key, error)

    async def _push_all(self, prompt: _Prompt) -> None:
        call = IngestCall(
            self._channels(prompt.grant.address),
            prompt.grant,
            drafter_digest=self._drafter_digest,
            hidden_size=self._hidden_size,
            timeout_s=self._timeout_s,
            # A service that refuses is not to be found out with the next chunk only.
            on_end=lambda: prompt.chunks.put_nowait(None),
        )
        try:
            while (chunk := await prompt.chunks.get()) is not None:
                try:
                    await call.send(chunk)
                finally:
                    self._release(chunk.num_bytes)
            self._metrics.sent_rows_total.inc(await call.finish())
        finally:
            call.cancel()

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self._queued_bytes -= num_bytes


class _Prompt:
    """One prompt on its way. num_rows: taken for it so far, known to be with the drafter only once
    all are. failure: set once it cannot get there any more."""

    def __init__(self, grant: DraftGrant) -> None:
        self.grant = grant
        self.chunks: asyncio.Queue[IngestChunk | None] = asyncio.Queue()
        self.num_rows = 0
        self.failure: KVBraidError | None = None
        self.task: asyncio.Task[None] | None = None

    def take_all(self) -> int:
        """Bytes of what still waits, which is thrown away."""
        num_bytes = 0
        while not self.chunks.empty():
            chunk = self.chunks.get_nowait()
            num_bytes += chunk.num_bytes if chunk is not None else 0
        return num_bytes
