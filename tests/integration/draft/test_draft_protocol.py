"""The Draft call from outside: handshake, idempotency, and what no honest client sends."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from kvbraid.v1 import draft_pb2 as pb

Code = grpc.StatusCode


async def fails_with(code: Code, words: str, awaitable: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    assert caught.value.code() is code
    assert words in (caught.value.details() or "")


async def assert_serves(service: Any, draft: Any) -> None:
    stream = draft.raw(service, incarnation=99)
    await stream.open()
    answers = await stream.step(1, [draft.task("fine", 0, [3])])
    assert list(answers.token_ids) == [4, 5, 6]


async def test_terms_say_what_the_drafter_is(service: Any, draft: Any) -> None:
    terms = await draft.raw(service).open()
    ours = draft.terms
    assert (terms.protocol_version, terms.epoch, terms.drafter_kind) == (1, 77, "dspark")
    assert (terms.hidden_size, terms.row_dtype) == (ours.hidden_size, "float32")
    assert tuple(terms.tap_layers) == ours.tap_layers
    assert (terms.max_draft_tokens, terms.predicts_from_anchor) == (4, True)
    assert (terms.vocab_size, terms.draft_vocab_size) == (50, 50)
    assert (terms.max_rows_per_message, terms.max_sequences) == (16, 8)


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        ({"protocol_version": 2}, "protocol version 2"),
        ({"target_digest": "x"}, "target digest"),
        ({"drafter_digest": "x"}, "drafter digest"),
        ({"vocab_size": 49}, "vocabulary size"),
        ({"vocab_size": 1, "target_digest": "x"}, "target digest of the worker x is not"),
    ],
)
async def test_a_worker_that_does_not_fit_is_refused_with_the_reason(
    hello: dict[str, Any], words: str, service: Any, draft: Any
) -> None:
    await fails_with(Code.FAILED_PRECONDITION, words, draft.raw(service, **hello).open())
    await assert_serves(service, draft)


async def test_every_reason_is_named(service: Any, draft: Any) -> None:
    stream = draft.raw(service, target_digest="x", drafter_digest="y", vocab_size=3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.open()
    details = caught.value.details() or ""
    assert all(word in details for word in ("target digest", "drafter digest", "vocabulary"))


async def test_the_first_message_must_be_hello_and_the_only_one(service: Any, draft: Any) -> None:
    stream = draft.raw(service)
    await fails_with(Code.INVALID_ARGUMENT, "hello", stream.step(1, [draft.task("a", 0, [1])]))
    twice = draft.raw(service)
    await twice.open()
    await fails_with(Code.INVALID_ARGUMENT, "hello", twice.open())
    await assert_serves(service, draft)


async def test_more_workers_than_the_service_takes_are_refused(draft: Any) -> None:
    async with draft.service(max_workers=2) as service:
        streams = [draft.raw(service, incarnation=i) for i in range(3)]
        for stream in streams[:2]:
            await stream.open()
        await fails_with(Code.RESOURCE_EXHAUSTED, "2 decode workers", streams[2].open())
        await streams[0].step(1, [draft.task("a", 0, [1])])
        streams[0].call.cancel()
        await draft.eventually(lambda: service.sample("kvbraid_draft_connected_workers") == 1)
        # The one that left makes room, and its sequences go.
        await draft.raw(service, incarnation=7).open()
        await draft.eventually(lambda: service.proposer.dropped)
        assert service.proposer.rows == {}


async def test_a_repeated_step_is_answered_as_before_and_taken_once(
    service: Any, draft: Any
) -> None:
    stream = draft.raw(service)
    await stream.open()
    first = await stream.step(1, [draft.task("a", 0, [1, 2])])
    # The same id with other contents: nothing of them is looked at.
    again = await stream.step(1, [draft.task("a", 0, [30])])
    assert first == again
    assert len(service.proposer.tasks) == 1
    stream.call.cancel()
    other = draft.raw(service)
    await other.open()
    assert await other.step(1, [draft.task("a", 0, [1, 2])]) == first
    assert (await other.step(2, [draft.task("a", 2, [7])])).statuses == [pb.DRAFT_STATUS_PROPOSED]
    assert len(service.proposer.tasks) == 2


async def test_a_step_repeated_while_it_is_computed_is_computed_once(
    service: Any, draft: Any
) -> None:
    service.proposer.gate.clear()
    first, second = draft.raw(service), draft.raw(service)
    await first.open()
    early = asyncio.create_task(first.step(1, [draft.task("a", 0, [1])]))
    await asyncio.to_thread(service.proposer.arrived.wait, 10)
    await second.open()
    late = asyncio.create_task(second.step(1, [draft.task("a", 0, [1])]))
    early.cancel()
    first.call.cancel()
    service.proposer.gate.set()
    assert list((await late).token_ids) == [2, 3, 4]
    assert len(service.proposer.tasks) == 1


async def test_an_old_step_and_another_epoch_are_refused(service: Any, draft: Any) -> None:
    stream = draft.raw(service)
    await stream.open()
    for step_id in range(10, 20):
        await stream.step(step_id, [draft.task("a", 0, [1])])
    await fails_with(Code.INVALID_ARGUMENT, "above 19", stream.step(10, [draft.task("a", 0, [1])]))
    other = draft.raw(service)
    await other.open()
    await fails_with(
        Code.ABORTED, "epoch 5 is over", other.step(20, [draft.task("a", 0, [1])], epoch=5)
    )
    await assert_serves(service, draft)


async def test_the_newer_stream_of_a_worker_is_the_one_that_counts(
    service: Any, draft: Any
) -> None:
    old, new = draft.raw(service), draft.raw(service)
    await old.open()
    await new.open()
    await new.step(1, [draft.task("a", 0, [1])])
    await fails_with(Code.ABORTED, "another stream", old.step(2, [draft.task("a", 0, [1])]))
    await new.step(2, [draft.task("a", 1, [2])])


MALFORMED = [
    ({"keys": ["a", "a"]}, "twice"),
    ({"keys": ["a"]}, "entries, not 1"),
    ({"keys": ["a", "x" * 300]}, "300 characters"),
    ({"keys": ["a", ""]}, "0 characters"),
    ({"first_positions": [0]}, "first_positions has 1 entries"),
    ({"first_positions": [0, 999]}, "below 1000"),
    ({"num_rows": [1, 3]}, "next_token_ids has 3 entries, not 4"),
    ({"num_rows": [1, 16]}, "accepted: up to 16"),
    ({"num_rows": [1, 2**32 - 1]}, "accepted: up to 16"),
    ({"next_token_ids": [1, 50, 2]}, "next_token_ids has 50"),
    ({"anchor_ids": [1, 4000000000]}, "anchor_ids has 4000000000"),
    ({"anchor_ids": [1, 7]}, "anchor_ids has 7, accepted: 2"),
    ({"rows": pb.DraftRows(inline=b"short")}, "rows have 5 bytes"),
    ({"rows": pb.DraftRows()}, "rows have 0 bytes"),
    ({"temperatures": [0.0, float("nan")]}, "temperature is nan"),
    ({"temperatures": [0.0, -1.0]}, "temperature is -1.0"),
    ({"signed_keys": [1]}, "signed_keys"),
    ({"starts_cold": [True]}, "starts_cold"),
    ({"num_wanted": [1, 2, 3]}, "num_wanted"),
    ({"dropped_keys": ["x"] * 5000}, "dropped_keys come to 5000"),
]


@pytest.mark.parametrize(("changes", "words"), MALFORMED)
async def test_a_malformed_step_is_refused_and_the_service_goes_on(
    changes: dict[str, Any], words: str, service: Any, draft: Any
) -> None:
    stream = draft.raw(service)
    await stream.open()
    tasks = [draft.task("a", 0, [1]), draft.task("b", 0, [1, 2])]
    await fails_with(Code.INVALID_ARGUMENT, words, stream.step(1, tasks, **changes))
    assert service.proposer.tasks == []
    await assert_serves(service, draft)


async def test_too_many_sequences_are_refused(service: Any, draft: Any) -> None:
    stream = draft.raw(service)
    await stream.open()
    tasks = [draft.task(f"s{i}", 0, [1]) for i in range(9)]
    await fails_with(Code.INVALID_ARGUMENT, "accepted: up to 8", stream.step(1, tasks))


async def test_bytes_that_are_no_message_end_only_their_own_call(service: Any, draft: Any) -> None:
    channel = service.pool.channel(service.address)
    for method in ("Draft", "Ingest"):
        call = channel.stream_stream(f"/kvbraid.v1.DraftService/{method}")()
        await call.write(b"\xff\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    await assert_serves(service, draft)


async def test_more_drafts_than_the_drafter_has_may_be_wanted(service: Any, draft: Any) -> None:
    stream = draft.raw(service)
    await stream.open()
    answers = await stream.step(1, [draft.task("a", 0, [1], wanted=4_000_000_000)])
    assert list(answers.num_drafts) == [4]


async def test_steps_that_wait_together_are_computed_together(service: Any, draft: Any) -> None:
    streams = [draft.raw(service, incarnation=i) for i in (1, 2, 3)]
    for stream in streams:
        await stream.open()
    service.proposer.gate.clear()
    first, *others = streams
    blocker = asyncio.create_task(first.step(1, [draft.task("a", 0, [1])]))
    await asyncio.to_thread(service.proposer.arrived.wait, 10)
    both = [asyncio.create_task(stream.step(1, [draft.task("a", 0, [2])])) for stream in others]
    await draft.eventually(lambda: service.num_queued == 2)
    service.proposer.gate.set()
    await asyncio.gather(blocker, *both)
    assert sorted(service.proposer.batches[-1]) == ["2/a", "3/a"]


async def test_sequences_of_a_worker_without_a_stream_are_given_up(
    draft: Any, stack: AsyncExitStack
) -> None:
    service = await stack.enter_async_context(draft.service(lease_seconds=1.5))
    gone = {"9/a", "a/a"}
    for incarnation in (9, 10):
        stream = draft.raw(service, incarnation=incarnation)
        await stream.open()
        await stream.step(incarnation, [draft.task("a", 0, [1])])
        stream.call.cancel()
        if incarnation == 9:
            back = draft.raw(service)
            await back.open()
    assert set(service.proposer.rows) == gone
    await draft.eventually(lambda: set(service.proposer.rows) == {"9/a"})
    # Its lease, had it gone on, would have ended before the other one's.
    assert (await back.step(20, [draft.task("a", 1, [2])])).step_id == 20
    back.call.cancel()
    await draft.eventually(lambda: not service.proposer.rows)
