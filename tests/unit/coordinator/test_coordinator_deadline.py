"""Waiting for a client ends with the time of its request; nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from coordinator.deadline import ClientWait, Deadline
from kvbraid.errors import DeadlineError

AT_ONCE = 1e-3


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


async def test_a_wait_ends_at_the_deadline() -> None:
    deadline = Deadline(AT_ONCE)
    with pytest.raises(DeadlineError, match=r"0\.001 s"), deadline.limited() as wait, wait:
        await for_ever()
    assert asyncio.current_task().cancelling() == 0


async def test_a_later_wait_of_the_same_request_ends_there_too() -> None:
    async def wait_again_and_again() -> None:
        with Deadline(AT_ONCE).limited() as wait:
            while True:
                with wait:
                    await asyncio.sleep(0)

    with pytest.raises(DeadlineError):
        await wait_again_and_again()


async def test_no_wait_begins_after_the_deadline() -> None:
    wait = ClientWait(Deadline(5.0))
    wait.expire()
    was_entered = False
    with pytest.raises(DeadlineError), wait:
        was_entered = True
    assert not was_entered


async def test_what_is_no_wait_for_the_client_goes_on_behind_the_deadline() -> None:
    with Deadline(0.0).limited() as wait:
        with wait:
            pass
        await asyncio.sleep(AT_ONCE)
        with pytest.raises(DeadlineError), wait:
            pass


async def test_the_timer_ends_with_the_block() -> None:
    with Deadline(AT_ONCE).limited() as wait:
        pass
    await asyncio.sleep(2 * AT_ONCE)
    with wait:
        await asyncio.sleep(0)


async def ended(body: Callable[[ClientWait], Awaitable[None]]) -> asyncio.Task[None]:
    """A task that ran `body` with its wait, whose deadline passed in a block; maybe more did."""
    waits: list[ClientWait] = []

    async def run() -> None:
        waits.append(ClientWait(Deadline(5.0)))
        await body(waits[0])

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    waits[0].expire()
    await asyncio.wait([task])
    return task


async def test_who_is_cancelled_at_the_deadline_is_cancelled() -> None:
    async def wait_and_be_cancelled(wait: ClientWait) -> None:
        with wait:
            asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
            await for_ever()

    task = await ended(wait_and_be_cancelled)
    assert task.cancelled()


async def test_an_error_at_the_deadline_stays_what_it_is() -> None:
    async def lose_the_client() -> None:
        try:
            await for_ever()
        except asyncio.CancelledError as error:
            raise ConnectionResetError from error

    async def fail(wait: ClientWait) -> None:
        with pytest.raises(ConnectionResetError), wait:
            await lose_the_client()
        assert asyncio.current_task().cancelling() == 0

    task = await ended(fail)
    assert task.exception() is None
