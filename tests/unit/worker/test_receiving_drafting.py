"""Rows of prompts on their way to a decode worker's own drafter: waited for, or done without."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import torch

from kvbraid.speculative.embedded_drafting import EmbeddedDrafting
from kvbraid.speculative.proposal import DraftTask
from kvbraid.transport.draft_terms import DraftTerms
from kvbraid.worker.receiving_drafting import ReceivingDrafting

PROMPT = 5


class Terms:
    epoch, row_dtype, max_rows_per_message = 1, "float32", 16


def receiving(*, rows_wait_s: float, rows_patience_s: float) -> ReceivingDrafting:
    drafting = ReceivingDrafting(
        cast(EmbeddedDrafting, object()),
        cast(DraftTerms, Terms()),
        address=lambda: "127.0.0.1:1",
        max_grants=4,
        lease_s=30.0,
        rows_wait_s=rows_wait_s,
        rows_patience_s=rows_patience_s,
    )
    drafting.open_grant("a", PROMPT)
    return drafting


def push(drafting: ReceivingDrafting, first: int, end: int) -> asyncio.Task[Any]:
    """As a prefill worker's chunk, in the event loop."""
    rows = torch.zeros(end - first, 2)
    task = DraftTask("own/a", first, rows, tuple(range(first, end)), end - 1, 0)
    return asyncio.get_running_loop().create_task(drafting._compute(task))


async def test_a_sequence_is_late_until_its_last_row_is_here() -> None:
    drafting = receiving(rows_wait_s=0.0, rows_patience_s=60.0)
    assert drafting.await_rows(["a", "other"]) == {"a"}
    pushes = [push(drafting, 0, 3)]
    await asyncio.sleep(0)
    assert drafting.await_rows(["a"]) == {"a"}
    pushes.append(push(drafting, 3, PROMPT))
    await asyncio.sleep(0)
    assert not drafting.await_rows(["a"])
    await asyncio.gather(*pushes)


@pytest.mark.parametrize("rows_wait_s", [0.0, 0.01])
async def test_without_patience_a_sequence_goes_on_and_rows_that_come_later_are_not_kept(
    rows_wait_s: float,
) -> None:
    drafting = receiving(rows_wait_s=rows_wait_s, rows_patience_s=0.0)
    kept: list[int] = []
    drafting.keep_in(lambda key, first, rows: kept.append(first))
    assert not drafting.await_rows(["a"])
    late = push(drafting, 0, PROMPT)
    await asyncio.sleep(0)
    drafting.take_rows()
    await late
    assert kept == []


async def test_a_step_that_waits_takes_rows_that_come_meanwhile() -> None:
    drafting = receiving(rows_wait_s=60.0, rows_patience_s=0.0)
    kept: list[int] = []
    drafting.keep_in(lambda key, first, rows: kept.append(first))
    waiting = asyncio.create_task(asyncio.to_thread(drafting.await_rows, ["a"]))
    pushes = [push(drafting, 0, 3), push(drafting, 3, PROMPT)]
    assert not await waiting
    await asyncio.gather(*pushes)
    assert kept == [0, 3]
