"""Grants for prompts: opened, waited for, given up."""

from __future__ import annotations

import asyncio

import pytest
import torch

from kvbraid.errors import InvalidRequestError, LeaseLostError
from kvbraid.speculative.proposal import DraftTask
from kvbraid.worker.ingest_grants import IngestGrants


def transfer(number: int) -> bytes:
    return bytes([number]) * 16


def task(key: str, first: int) -> DraftTask:
    return DraftTask(key, first, torch.zeros(0, 2), (), 1, 3)


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def grants(now: list[float]) -> IngestGrants:
    return IngestGrants(max_grants=3, lease_s=10.0, clock=lambda: now[0])


async def test_more_grants_than_places_end_the_oldest(grants: IngestGrants) -> None:
    for number in range(1, 5):
        grants.open(f"k{number}", transfer(number), 4)
    assert grants.num_open == 3
    with pytest.raises(LeaseLostError, match="not opened within"):
        await grants.begin(transfer(1), 0.0)
    assert (await grants.begin(transfer(4), 0.0)).key == "k4"


async def test_a_new_grant_of_a_sequence_ends_the_older(grants: IngestGrants) -> None:
    grants.open("a", transfer(1), 4)
    older = await grants.begin(transfer(1), 0.0)
    grants.open("a", transfer(2), 4)
    assert older.is_over
    assert grants.num_open == 1


async def test_a_silent_grant_ends_with_its_lease(grants: IngestGrants, now: list[float]) -> None:
    grants.open("a", transfer(1), 4)
    grants.open("b", transfer(2), 4)
    busy = await grants.begin(transfer(2), 0.0)
    now[0] += 9
    busy.advance(1, now[0])
    now[0] += 2
    grants.open("c", transfer(3), 4)
    assert grants.num_open == 2
    with pytest.raises(LeaseLostError, match="takes no rows"):
        await grants.begin(transfer(1), 0.0)


@pytest.mark.parametrize("transfer_id", [b"", b"short", transfer(1)])
async def test_malformed_and_used_ids_are_refused(transfer_id: bytes, grants: IngestGrants) -> None:
    grants.open("a", transfer(1), 4)
    with pytest.raises(InvalidRequestError, match="transfer_id"):
        grants.open("b", transfer_id, 4)


async def test_those_that_wait_for_a_grant_are_bounded(grants: IngestGrants) -> None:
    waiting = [asyncio.create_task(grants.begin(transfer(i), 10.0)) for i in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(LeaseLostError, match="is not open"):
        await grants.begin(transfer(9), 10.0)
    with pytest.raises(LeaseLostError, match="is not open"):
        await grants.begin(transfer(0), 10.0)
    grants.open("a", transfer(0), 4)
    assert (await waiting[0]).key == "a"
    for left in waiting[1:]:
        left.cancel()
    await asyncio.wait(waiting[1:])


async def test_tasks_without_a_grant_never_wait(grants: IngestGrants) -> None:
    grants.open("other", transfer(1), 4)
    tasks = [task("a", 4)]
    assert await grants.settle(tasks, 3600.0) == tasks


async def test_rows_up_to_the_tasks_first_position_are_enough(grants: IngestGrants) -> None:
    grants.open("a", transfer(1), 4)
    grant = await grants.begin(transfer(1), 0.0)
    settled = asyncio.create_task(grants.settle([task("a", 3)], 3600.0))
    await asyncio.sleep(0)
    assert not settled.done()
    grant.advance(2, 0.0)
    grant.advance(3, 0.0)
    (found,) = await settled
    assert not found.starts_cold
    assert grant.is_over, "the sequence has begun: nothing older may be written into it"


async def test_a_grant_that_ends_lets_its_step_go_on_cold_at_once(grants: IngestGrants) -> None:
    grants.open("a", transfer(1), 4)
    grant = await grants.begin(transfer(1), 0.0)
    settled = asyncio.create_task(grants.settle([task("a", 4), task("b", 0)], 3600.0))
    await asyncio.sleep(0)
    grant.end()
    assert [found.starts_cold for found in await settled] == [True, False]


async def test_a_wait_is_for_all_tasks_together(grants: IngestGrants) -> None:
    for number, key in enumerate("abc"):
        grants.open(key, transfer(number), 4)
    found = await grants.settle([task(key, 4) for key in "abc"], 0.01)
    assert [one.starts_cold for one in found] == [True] * 3
    assert grants.num_open == 0
