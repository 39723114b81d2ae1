"""Rows of prompts: pushed by a prefill worker, waited for by the first step."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch

from kvbraid.speculative.proposal import Proposal, Resync
from kvbraid.transport.draft_grant import DraftGrant
from kvbraid.transport.grant import new_transfer_id
from kvbraid.v1 import draft_pb2 as pb

Code = grpc.StatusCode


async def ingest(service: Any, *requests: pb.IngestRequest) -> int:
    response = await service.stub.Ingest(iter(requests), timeout=20)
    return int(response.num_rows)


def chunk(
    grant: DraftGrant | None, draft: Any, first: int, ids: list[int], **changes: Any
) -> pb.IngestRequest:
    rows = changes.pop("rows", draft.rows(first, len(ids)))
    request = pb.IngestRequest(
        first_position=first,
        rows=pb.DraftRows(inline=rows.numpy().tobytes()),
        next_token_ids=ids,
        starts_cold=changes.pop("starts_cold", False),
    )
    if grant is not None:
        values = {
            "transfer_id": grant.transfer_id, "incarnation": grant.incarnation, "key": grant.key,
            "drafter_digest": "drafter", "hidden_size": draft.hidden, "row_dtype": "float32",
        } | changes  # fmt: skip
        request.target.CopyFrom(pb.IngestTarget(**values))
    return request


async def test_pushed_rows_are_there_for_the_first_step(
    service: Any, target: Any, draft: Any
) -> None:
    grant = target.drafting.open_grant("a", 5)
    first = chunk(grant, draft, 0, [1, 2, 3])
    assert await ingest(service, first, chunk(None, draft, 3, [4, 5])) == 5
    assert await target.step(draft.task("a", 5, [], anchor_id=6)) == [
        Proposal((7, 8, 9), (0.5,) * 3)
    ]
    key = service.proposer.tasks[0].key
    torch.testing.assert_close(service.proposer.rows[key], draft.rows(0, 5))
    ids = [task.next_token_ids for task in service.proposer.tasks]
    assert ids == [(1, 2, 3), (4, 5), ()]


async def test_rows_may_come_before_the_grant_is_open(service: Any, draft: Any) -> None:
    async with draft.target(service.address) as target:
        await target.connected()
        grant = DraftGrant(service.address, new_transfer_id(), 77, "a", "float32", 16)
        early = asyncio.create_task(ingest(service, chunk(grant, draft, 0, [1, 2])))
        await draft.eventually(
            lambda: service.server.num_running == 2  # the stream and the push that waits
        )
        stream = draft.raw(service)
        await stream.open()
        opened = pb.DraftOpen(key="a", transfer_id=grant.transfer_id, end_position=2)
        await stream.call.write(pb.DraftRequest(open=opened))
        assert await early == 2


async def test_pushed_rows_go_with_the_worker_that_wanted_them(
    draft: Any, stack: AsyncExitStack
) -> None:
    service = await stack.enter_async_context(draft.service(lease_seconds=0.5))
    async with draft.target(service.address) as target:
        await target.connected()
        grant = target.drafting.open_grant("a", 2)
        assert await ingest(service, chunk(grant, draft, 0, [1, 2])) == 2
        assert len(service.proposer.rows) == 1
    await draft.eventually(lambda: not service.proposer.rows)


async def test_rows_of_a_grant_that_is_never_opened_are_refused_in_time(
    service: Any, draft: Any
) -> None:
    grant = DraftGrant(service.address, new_transfer_id(), 77, "a", "float32", 16)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ingest(service, chunk(grant, draft, 0, [1]))
    assert caught.value.code() is Code.ABORTED


async def test_a_step_waits_for_rows_that_are_on_their_way(
    draft: Any, stack: AsyncExitStack
) -> None:
    service = await stack.enter_async_context(draft.service(ingest_wait_ms=10000.0))
    target = await stack.enter_async_context(draft.target(service.address))
    await target.connected()
    grant = target.drafting.open_grant("a", 4)
    call = service.stub.Ingest(timeout=20)
    await call.write(chunk(grant, draft, 0, [1, 2]))
    await draft.eventually(lambda: service.proposer.tasks)
    step = asyncio.create_task(target.step(draft.task("a", 4, [], anchor_id=6)))
    await call.write(chunk(None, draft, 2, [3, 4]))
    assert isinstance((await step)[0], Proposal)
    assert service.proposer.tasks[-1].starts_cold is False
    await call.done_writing()
    await call


@pytest.mark.parametrize("num_pushed", [0, 2])
async def test_a_step_goes_on_cold_where_rows_do_not_come(
    num_pushed: int, service: Any, target: Any, draft: Any
) -> None:
    grant = target.drafting.open_grant("a", 4)
    if num_pushed:
        await ingest(service, chunk(grant, draft, 0, [1, 2]))
    answers = await target.step(draft.task("a", 4, [], anchor_id=6), draft.task("b", 0, [1]))
    assert answers == [Proposal((7, 8, 9), (0.5,) * 3), Proposal((2, 3, 4), (0.5,) * 3)]
    assert service.proposer.tasks[-2].starts_cold
    # Once only: the grant is gone, and late rows with it.
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ingest(service, chunk(grant, draft, num_pushed, [3, 4]))
    assert caught.value.code() is Code.ABORTED
    assert await target.step(draft.task("a", 9, [1])) == [Resync(4)]


KINDS = [
    ({"drafter_digest": "x"}, Code.FAILED_PRECONDITION, "drafter digest x"),
    ({"hidden_size": 5}, Code.FAILED_PRECONDITION, "hidden_size 5"),
    ({"row_dtype": "bfloat16"}, Code.FAILED_PRECONDITION, "row_dtype bfloat16"),
    ({"incarnation": 1}, Code.ABORTED, "incarnation 1 is over"),
    ({"key": "b"}, Code.ABORTED, "is not of 'b'"),
    ({"key": ""}, Code.INVALID_ARGUMENT, "0 characters"),
]
CHUNKS = [
    (0, [1, 2, 3, 4, 5, 6], {}, "rows end at 6, the grant at 5"),
    (1, [1], {}, "first_position is 1, accepted: 0"),
    (0, [], {}, "0 rows"),
    (0, [1] * 17, {}, "17 rows, accepted: 1 to 16"),
    (0, [1, 50], {}, "next_token_ids has 50"),
    (2**32 - 1, [1], {"starts_cold": True}, "below 1000"),
    (0, [1, 2], {"rows": torch.zeros(1, 4)}, "rows have 16 bytes"),
    (0, [1, 2], {"rows": torch.full((2, 4), float("inf"))}, "not finite"),
]


async def assert_refused(code: Code, words: str, awaitable: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    assert (caught.value.code(), words in (caught.value.details() or "")) == (code, True)


async def assert_serves(service: Any, target: Any, draft: Any) -> None:
    grant = target.drafting.open_grant("fine", 1)
    assert await ingest(service, chunk(grant, draft, 0, [3])) == 1
    assert (await target.step(draft.task("fine", 1, [], anchor_id=3)))[0] is not None


@pytest.mark.parametrize(("changes", "code", "words"), KINDS)
async def test_rows_of_another_kind_are_refused(
    changes: dict[str, Any], code: Code, words: str, service: Any, target: Any, draft: Any
) -> None:
    grant = target.drafting.open_grant("a", 5)
    await assert_refused(code, words, ingest(service, chunk(grant, draft, 0, [1], **changes)))
    assert service.proposer.tasks == []
    await assert_serves(service, target, draft)


@pytest.mark.parametrize(("first", "ids", "changes", "words"), CHUNKS)
async def test_malformed_rows_are_refused_and_the_service_goes_on(
    first: int,
    ids: list[int],
    changes: dict[str, Any],
    words: str,
    service: Any,
    target: Any,
    draft: Any,
) -> None:
    grant = target.drafting.open_grant("a", 5)
    request = chunk(grant, draft, first, ids, **changes)
    await assert_refused(Code.INVALID_ARGUMENT, words, ingest(service, request))
    assert service.proposer.tasks == []
    await assert_serves(service, target, draft)


async def test_rows_without_a_target_and_a_gap_are_refused(
    service: Any, target: Any, draft: Any
) -> None:
    refused = ingest(service, chunk(None, draft, 0, [1]))
    await assert_refused(Code.INVALID_ARGUMENT, "target", refused)
    grant = target.drafting.open_grant("a", 5)
    gap = ingest(service, chunk(grant, draft, 0, [1]), chunk(None, draft, 2, [1]))
    await assert_refused(Code.INVALID_ARGUMENT, "accepted: 1", gap)


async def test_rows_pushed_twice_are_refused(service: Any, target: Any, draft: Any) -> None:
    grant = target.drafting.open_grant("a", 1)
    await ingest(service, chunk(grant, draft, 0, [1]))
    again = ingest(service, chunk(grant, draft, 0, [1]))
    await assert_refused(Code.ABORTED, "takes no rows any more", again)


async def test_a_silent_push_ends_with_its_lease(draft: Any, stack: AsyncExitStack) -> None:
    service = await stack.enter_async_context(draft.service(lease_seconds=0.1))
    target = await stack.enter_async_context(draft.target(service.address))
    await target.connected()
    call = service.stub.Ingest(timeout=20)
    await call.write(chunk(target.drafting.open_grant("a", 5), draft, 0, [1]))
    await assert_refused(Code.DEADLINE_EXCEEDED, "no rows came for 0.1 s", call)


async def test_pushed_rows_are_acknowledged_once_the_drafter_has_all_of_a_prompt(
    service: Any, target: Any, draft: Any
) -> None:
    grant = target.drafting.open_grant("a", 5)
    async with draft.pusher() as pusher:
        pusher.rows.begin(grant)
        pusher.rows.push(grant.transfer_id, 0, draft.rows(0, 3), [1, 2, 3])
        await draft.eventually(lambda: service.proposer.tasks)
        pusher.rows.push(grant.transfer_id, 3, draft.rows(3, 2), [4, 5])
        await draft.eventually(lambda: pusher.num_unacknowledged == 5)
        pusher.rows.finish(grant.transfer_id)
        await draft.eventually(lambda: pusher.num_unacknowledged == 0)
        assert pusher.num_sent == 5


async def test_the_pusher_cuts_casts_and_sends_what_the_engine_hands_over(
    service: Any, target: Any, draft: Any
) -> None:
    grant = target.drafting.open_grant("a", 40)
    async with draft.pusher() as pusher:
        pusher.rows.begin(grant)
        buffer = draft.rows(0, 30).double()
        pusher.rows.push(grant.transfer_id, 0, buffer, range(30))
        buffer.fill_(float("nan"))  # the engine's own again
        pusher.rows.push(grant.transfer_id, 30, draft.rows(30, 10), range(30, 40))
        pusher.rows.finish(grant.transfer_id)
        await draft.eventually(lambda: pusher.num_sent == 40)
    key = service.proposer.tasks[0].key
    torch.testing.assert_close(service.proposer.rows[key], draft.rows(0, 40))
    assert [len(task.next_token_ids) for task in service.proposer.tasks] == [16, 14, 10]
    assert sum((t.next_token_ids for t in service.proposer.tasks), ()) == tuple(range(40))
    assert isinstance((await target.step(draft.task("a", 40, [], anchor_id=1)))[0], Proposal)


async def test_rows_that_begin_behind_a_prefix_hit_start_cold(
    service: Any, target: Any, draft: Any
) -> None:
    grant = target.drafting.open_grant("a", 8)
    async with draft.pusher() as pusher:
        pusher.rows.begin(grant)
        pusher.rows.push(grant.transfer_id, 6, draft.rows(6, 2), [1, 2], starts_cold=True)
        pusher.rows.finish(grant.transfer_id)
        await draft.eventually(lambda: pusher.num_sent == 2)
    assert isinstance((await target.step(draft.task("a", 8, [], anchor_id=2)))[0], Proposal)
    assert service.proposer.bases == {service.proposer.tasks[0].key: 6}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"address": "127.0.0.1:1"}, "UNAVAILABLE"),
        ({"incarnation": 5}, "LEASE_LOST"),
        ({"row_dtype": "float16"}, "INCOMPATIBLE"),
    ],
)
async def test_a_push_that_fails_is_counted_and_nothing_else(
    change: dict[str, Any], reason: str, target: Any, draft: Any
) -> None:
    grant = replace(target.drafting.open_grant("a", 4), **change)
    async with draft.pusher() as pusher:
        pusher.rows.begin(grant)
        pusher.rows.push(grant.transfer_id, 0, draft.rows(0, 2), [1, 2])
        await draft.eventually(lambda: pusher.failures(reason) == 1)
        assert pusher.num_unacknowledged == 0
        pusher.rows.push(grant.transfer_id, 2, draft.rows(2, 2), [1, 2])
        pusher.rows.finish(grant.transfer_id)
        pusher.rows.finish(grant.transfer_id)
        pusher.rows.push(grant.transfer_id, 4, draft.rows(4, 1), [1])
        assert pusher.num_sent == 0


async def test_rows_that_find_no_room_end_their_own_push_only(
    service: Any, target: Any, draft: Any
) -> None:
    service.proposer.gate.clear()
    grants = [target.drafting.open_grant(key, 16) for key in "abc"]
    async with draft.pusher(max_queued_bytes=20 * 16) as pusher:
        for grant in grants[:2]:
            pusher.rows.begin(grant)
            # Not a turn of the loop in between, so nothing has left yet.
            pusher.rows.push(grant.transfer_id, 0, draft.rows(0, 16), range(16))
            pusher.rows.finish(grant.transfer_id)
        await draft.eventually(lambda: pusher.failures("OVERLOADED") == 1)
        service.proposer.gate.set()
        await draft.eventually(lambda: pusher.num_sent == 16)
        pusher.rows.begin(grants[2])
        pusher.rows.push(grants[2].transfer_id, 0, draft.rows(0, 16), range(16))
        pusher.rows.finish(grants[2].transfer_id)
        await draft.eventually(lambda: pusher.num_sent == 32)


async def test_a_cancelled_push_is_no_failure_and_sends_no_more(
    service: Any, target: Any, draft: Any
) -> None:
    grant = target.drafting.open_grant("a", 4)
    async with draft.pusher() as pusher:
        pusher.rows.begin(grant)
        pusher.rows.push(grant.transfer_id, 0, draft.rows(0, 2), [1, 2])
        await draft.eventually(lambda: service.proposer.tasks)
        pusher.rows.cancel(grant.transfer_id)
        pusher.rows.cancel(grant.transfer_id)
        pusher.rows.push(grant.transfer_id, 2, draft.rows(2, 2), [1, 2])
        await draft.eventually(lambda: service.server.num_running == 1)
        assert (pusher.num_sent, pusher.failures("UNAVAILABLE")) == (0, 0)
    assert len(service.proposer.tasks) == 1
