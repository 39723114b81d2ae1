from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

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


@pytest.mark.parametrize(("own", "niceness"), [(12, 17), (18, 19)])
async def test_a_process_that_is_nice_already_computes_nicer_still(own: int, niceness: int) -> None:
    seen: list[int] = []

    def body() -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    loop = asyncio.get_running_loop()

    def start() -> EngineThread:
        # A thread inherits from the one that starts it.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own)
        thread = EngineThread(body, loop, torch.device("cpu"), 1)
        thread.start()
        return thread

    with ThreadPoolExecutor(1) as nice_one:
        thread = await loop.run_in_executor(nice_one, start)
    await asyncio.wait_for(thread.finished, 10)
    assert seen == [niceness]


async def test_an_error_of_the_body_is_its_failure() -> None:
    def body() -> None:
        raise ValueError("broken")

    thread = EngineThread(body, asyncio.get_running_loop(), torch.device("cpu"), 1)
    thread.start()
    assert await asyncio.wait_for(thread.failure, 10) == "engine: ValueError: broken"
    assert thread.finished.done()
