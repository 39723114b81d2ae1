"""Which calls a server takes: all, or while it drains only those that let running work finish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvbraid.errors import UnavailableError

# Taken while draining and not waited for: they serve work that was admitted before.
ALWAYS_TAKEN = (
    "/grpc.",
    "/kvbraid.v1.InfoService/",
    "/kvbraid.v1.KvTransferService/",
    "/kvbraid.v1.DecodeService/Start",
    "/kvbraid.v1.DecodeService/Abort",
)


class Admission:
    """Counts the calls that are being served and refuses new ones once draining."""

    def __init__(self) -> None:
        self._num_running = 0
        self._is_draining = False
        self._on_close: list[Callable[[], None]] = []
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Calls being served, those always taken left out."""
        return self._num_running

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused."""
        return self._is_draining

    @contextmanager
    def admitted(self, method: str) -> Iterator[None]:
        """Serve a call to `method` ("/package.Service/Method") inside the block.

        Raises UnavailableError when the server drains.
        """
        if method.startswith(ALWAYS_TAKEN):
            yield
            return
        if self._is_draining:
            raise UnavailableError("draining: this process takes no new requests")
        self._num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._idle.set()

    def on_close(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the server begins to drain: whoever keeps calls open that would
        not end by themselves ends them."""
        self._on_close.append(listener)

    def close(self) -> None:
        """Refuse new calls from now on."""
        self._is_draining = True
        for listener in self._on_close:
            listener()

    async def wait_idle(self, seconds: float) -> bool:
        """Wait for the running calls to end; False when some still run after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
