"""Keeps a decode worker's stream to its draft service open, in the I/O loop."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from kvbraid.errors import KVBraidError
from kvbraid.transport.draft_stream import DraftStream, OutgoingMessage, open_draft_stream
from kvbraid.transport.draft_terms import DraftPeer
from kvbraid.transport.grpc_push import ChannelFactory

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 5.0
_FIRST_RETRY_S = 0.1
_MAX_RETRY_S = 5.0


class DraftLink:
    """Connects, connects again with growing pauses, and writes what is posted, in order.

    on_change: called in the loop with the stream when it opens and with None when it is lost.
    """

    def __init__(
        self,
        *,
        address: str,
        peer: DraftPeer,
        channels: ChannelFactory,
        on_change: Callable[[DraftStream | None], None],
        first_retry_s: float = _FIRST_RETRY_S,
    ) -> None:
        self._address = address
        self._peer = peer
        self._channels = channels
        self._on_change = on_change
        self._first_retry_s = first_retry_s
        self._outgoing: asyncio.Queue[OutgoingMessage] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._stream: DraftStream | None = None

    def start(self) -> None:
        """Connect from the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(_report)

    async def stop(self) -> None:
        """Close the stream; nothing is connected or written afterwards."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    def post(self, message: OutgoingMessage, stream: DraftStream) -> None:
        """Write `message`, made for `stream`; when that one is lost the step is told at once."""
        if stream is self._stream:
            self._outgoing.put_nowait(message)
        elif message.on_answer is not None:
            message.on_answer(None)

    async def _run(self) -> None:
        pause_s = self._first_retry_s
        last_reason = ""
        while True:
            try:
                stream = await open_draft_stream(
                    self._channels(self._address), self._address, self._peer, timeout_s=_HANDSHAKE_S
                )
                logger.info("drafts come from %s", self._address)
                pause_s, last_reason = self._first_retry_s, ""
                await self._use(stream)
                reason = "the draft service drains"
            except KVBraidError as error:
                reason = str(error)
            if reason != last_reason:
                logger.warning("no drafts, decoding plainly: %s", reason)
                last_reason = reason
            # Workers that lost the same service must not all come back at once.
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))
            pause_s = min(2 * pause_s, max(_MAX_RETRY_S, self._first_retry_s))

    async def _use(self, stream: DraftStream) -> None:
        """Until the service says goodbye; raises the KVBraidError that ends the stream."""
        loop = asyncio.get_running_loop()
        self._stream = stream
        self._on_change(stream)
        reader = loop.create_task(self._read(stream))
        writer = loop.create_task(self._write(stream))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stream = None
            self._on_change(None)
            reader.cancel()
            writer.cancel()
            stream.close()
            self._forget_outgoing()
            await asyncio.wait({reader, writer})
        for task in (reader, writer):
            if not task.cancelled():
                task.result()

    async def _read(self, stream: DraftStream) -> None:
        while await stream.receive():
            pass

    async def _write(self, stream: DraftStream) -> None:
        while True:
            await stream.send(await self._outgoing.get())

    def _forget_outgoing(self) -> None:
        while not self._outgoing.empty():
            message = self._outgoing.get_nowait()
            if message.on_answer is not None:
                message.on_answer(None)


def _report(task: asyncio.Task[None]) -> None:
    """The task ends by being cancelled; anything else is a bug, and must not be a silent one."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("no more drafts until this worker is restarted", exc_info=error)
