"""The thread that an engine loop runs in, and how its end reaches the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

# Where a model computes on all cores, event loops that move its rows and tokens must still get
# their turn at once. So much nicer than they are: the process itself may be nice already. Threads
# that the engine thread starts for its products inherit it.
_MORE_NICENESS = 5
_MOST_NICENESS = 19


class EngineFailedError(Exception):
    """The engine thread of rank 0 has ended by an error; the worker ends without a farewell."""


class EngineThread:
    """Runs `body` in a thread of its own, with `device` as its current one and so many threads for
    its products on CPU.

    failure: resolves with a reason when `body` ends by an error; never otherwise.
    finished: resolves when `body` ends in whatever way.
    """

    def __init__(
        self,
        body: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
        device: torch.device,
        num_compute_threads: int,
    ) -> None:
        self.failure: asyncio.Future[str] = loop.create_future()
        self.finished: asyncio.Future[None] = loop.create_future()
        self._body = body
        self._device = device
        self._num_compute_threads = num_compute_threads
        self._loop = loop
        # A daemon: a rank that hangs in a collective must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stack(self) -> str:
        """Where the thread is now, as a traceback says it; empty when it does not run."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def _run(self) -> None:
        reason = ""
        try:
            torch.set_num_threads(self._num_compute_threads)
            if self._device.type == "cuda":
                # The current device is each thread's own, and kernels are launched on it.
                torch.cuda.set_device(self._device)
            elif self._device.type == "cpu":
                _yield_to_others()
            self._body()
        except Exception as error:
            logger.exception("the engine stopped")
            reason = f"engine: {type(error).__name__}: {error}"
        self._loop.call_soon_threadsafe(self._end, reason)

    def _end(self, reason: str) -> None:
        # First what ends the running calls, then what closes the server.
        self.finished.set_result(None)
        if reason:
            self.failure.set_result(reason)


def _yield_to_others() -> None:
    """Make this thread nicer. Never less nice, which only privileged processes may do."""
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread) + _MORE_NICENESS
    os.setpriority(os.PRIO_PROCESS, thread, min(niceness, _MOST_NICENESS))
