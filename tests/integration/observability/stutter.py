"""Processes that stand still again and again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.integration.observability.watched import Watched


@contextmanager
def stuttering(watched: Watched, name: str, *, stop_s: float, run_s: float) -> Iterator[None]:
    """While the block lasts, process `name` stands still for stop_s after every run_s."""
    ending = threading.Event()

    def stutter() -> None:
        while not ending.wait(run_s):
            watched.signal(name, signal.SIGSTOP)
            ending.wait(stop_s)
            watched.signal(name, signal.SIGCONT)

    thread = threading.Thread(target=stutter)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
