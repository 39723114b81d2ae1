from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from kvbraid.worker.engine_thread import EngineThread


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


async def test_it_computes_with_its_own_number_of_threads_and_yields_to_event_loops() -> None:
    seen: list[int] = []

    def body() -> None:
        niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        seen.extend((torch.get_num_threads(), niceness))

    torch.set_num_threads(1)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    thread = EngineThread(body, asyncio.get_running_loop(), torch.device("cpu"), 2)
    thread.start()
    await asyncio.wait_for(thread.finished, 10)
    assert seen[0] == 2
    assert seen[1] > own
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


async def test_an_error_of_the_body_is_its_failure() -> None:
    def body() -> None:
        raise ValueError("broken")

    thread = EngineThread(body, asyncio.get_running_loop(), torch.device("cpu"), 1)
    thread.start()
    assert await asyncio.wait_for(thread.failure, 10) == "engine: ValueError: broken"
    assert thread.finished.done()
