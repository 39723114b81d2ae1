"""Keeps a decode worker's stream to its draft service open, in the I/O loop."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable

from kvbraid.errors import KVBraidError
from kvbraid.settings.tls import TlsSettings
from kvbraid.transport.draft_connection import DraftWireChoice, open_draft_stream
from kvbraid.transport.draft_stream import DraftStream
from kvbraid.transport.draft_terms import DraftPeer
from kvbraid.transport.grpc_push import ChannelFactory

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 5.0
_FIRST_RETRY_S = 0.1
_MAX_RETRY_S = 5.0
# A stream that ends sooner, say by the first step, has changed nothing: pauses go on growing.
_LASTING_S = 5.0


class DraftLink:
    """Connects, and connects again with growing pauses.

    wire: how the stream is carried. tls: what channels are made with. on_change: called in the
    loop with the stream when it opens and with None when it is lost.
    """

    def __init__(
        self,
        *,
        address: str,
        peer: DraftPeer,
        channels: ChannelFactory,
        wire: DraftWireChoice,
        tls: TlsSettings,
        on_change: Callable[[DraftStream | None], None],
        first_retry_s: float = _FIRST_RETRY_S,
    ) -> None:
        self._address = address
        self._peer = peer
        self._channels = channels
        self._wire = wire
        self._tls = tls
        self._on_change = on_change
        self._first_retry_s = first_retry_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect from the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(_report)

    async def stop(self) -> None:
        """Close the stream; nothing is connected afterwards."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def _run(self) -> None:
        pause_s, last_reason = self._first_retry_s, ""
        while True:
            reason, lasted_s = await self._until_lost()
            if lasted_s >= _LASTING_S:
                pause_s, last_reason = self._first_retry_s, ""
            if reason != last_reason:
                logger.warning("no drafts, decoding plainly: %s", reason)
                last_reason = reason
            # Workers that lost the same service must not all come back at once.
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))
            pause_s = min(2 * pause_s, max(_MAX_RETRY_S, self._first_retry_s))

    async def _until_lost(self) -> tuple[str, float]:
        """Why there is no stream any more, and for how many seconds there was one."""
        opened_s = math.inf
        try:
            stream = await open_draft_stream(
                self._channels(self._address),
                self._address,
                self._peer,
                self._wire,
                tls=self._tls,
                timeout_s=_HANDSHAKE_S,
            )
            logger.info("drafts come from %s by %s", self._address, stream.wire)
            opened_s = time.monotonic()
            await self._use(stream)
            reason = "the draft service drains"
        except KVBraidError as error:
            reason = str(error)
        return reason, max(0.0, time.monotonic() - opened_s)

    async def _use(self, stream: DraftStream) -> None:
        """Until the service says goodbye; raises the KVBraidError that ends the stream."""
        self._on_change(stream)
        try:
            await stream.run()
        finally:
            self._on_change(None)
            stream.close()


def _report(task: asyncio.Task[None]) -> None:
    """The task ends by being cancelled; anything else is a bug, and must not be a silent one."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("no more drafts until this worker is restarted", exc_info=error)
