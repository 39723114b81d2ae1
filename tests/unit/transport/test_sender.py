"""The engine thread's side of a sender: it never waits and no peer makes it raise."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from kvbraid.errors import (
    IncompatibleError,
    LeaseLostError,
    RequestCancelledError,
    UnavailableError,
)
from kvbraid.kv.handoff import KvLayout, RowRun, plan_handoff
from kvbraid.transport.grants import Grant, RankEndpoint
from kvbraid.transport.sender import KvSender

LAYOUT = KvLayout("mla", 2, 1, 4, 8, "float32", 1, 1, 4, 1, "digest")
DESTINATION = replace(LAYOUT, tp_size=2, dcp_size=2)
ROW_BYTES = 32


def no_channel(address: str) -> grpc.aio.Channel:
    raise AssertionError(f"no call to {address} is expected")


def grant(slot_bytes: int = 128) -> Grant:
    endpoints = tuple(RankEndpoint(r, f"h:{r}", "host", "", 4, slot_bytes) for r in range(2))
    return Grant(b"i" * 16, 1, 1, 0, 40, DESTINATION, endpoints, 1000)


def gather(
    transfer_id: bytes, layers: range, heads: range, positions: NDArray[np.int32]
) -> memoryview:
    return memoryview(bytes(len(layers) * len(heads) * len(positions) * ROW_BYTES))


def begun(given: Grant, **options: Any) -> KvSender:
    sender = KvSender(rank=0, channels=no_channel, **options)
    sender.begin(given, plan_handoff(LAYOUT, DESTINATION, 0, 40), 2, ROW_BYTES)
    return sender


def test_only_computed_rows_are_gathered() -> None:
    sender = begun(grant(), max_outbox_bytes=1 << 20)
    assert sender.pump(gather, 1 << 20) == 0
    sender.add_positions(grant().transfer_id, 5)
    sender.add_positions(grant().transfer_id, 3)
    assert sender.pump(gather, 1 << 20) == 2 * 5 * ROW_BYTES
    assert sender.pump(gather, 1 << 20) == 0


def test_frames_fit_into_messages_of_ours_whatever_slots_the_peer_has() -> None:
    sizes = []

    def measured(*rows: Any) -> memoryview:
        sizes.append(gather(*rows).nbytes)
        return gather(*rows)

    sender = begun(grant(slot_bytes=1 << 20), max_frame_bytes=128, max_outbox_bytes=1 << 21)
    sender.add_positions(grant().transfer_id, 40)
    sender.pump(measured, 1 << 20)
    assert set(sizes) == {128}


def test_outbox_takes_no_more_than_its_bound() -> None:
    sender = begun(grant(), max_outbox_bytes=640)
    sender.add_positions(grant().transfer_id, 40)
    assert sender.pump(gather, 1 << 20) == 640
    assert sender.pump(gather, 1 << 20) == 0


def test_one_pump_gathers_about_its_budget() -> None:
    sender = begun(grant())
    sender.add_positions(grant().transfer_id, 40)
    assert 200 <= sender.pump(gather, 200) < 200 + 128


def test_lanes_share_the_budget() -> None:
    sender = begun(grant())
    sender.add_positions(grant().transfer_id, 40)
    parities: list[int] = []

    def noting(
        transfer_id: bytes, layers: range, heads: range, positions: NDArray[np.int32]
    ) -> memoryview:
        parities.append(int(positions[0]) % 2)
        return gather(transfer_id, layers, heads, positions)

    sender.pump(noting, 512)
    assert sorted(parities) == [0, 0, 1, 1]


def test_cancelled_transfer_gathers_nothing() -> None:
    sender = begun(grant())
    sender.add_positions(grant().transfer_id, 40)
    sender.cancel(grant().transfer_id)
    assert sender.pump(gather, 1 << 20) == 0
    assert isinstance(sender.status(grant().transfer_id).failure, RequestCancelledError)


def test_slots_of_a_peer_that_are_too_small_fail_the_transfer_and_not_the_thread() -> None:
    """dcp.md bug 45: a geometry that does not fit fails the request, never the thread."""
    sender = begun(grant(slot_bytes=ROW_BYTES - 1))
    status = sender.status(grant().transfer_id)
    assert isinstance(status.failure, IncompatibleError)
    assert not status.is_complete
    sender.add_positions(grant().transfer_id, 40)
    assert sender.pump(gather, 1 << 20) == 0


async def test_a_prompt_may_queue_and_compute_for_hours() -> None:
    """As long as `request_timeout_seconds` lets it; 600 s ended its handoff whatever that said."""
    timeouts: asyncio.Queue[float] = asyncio.Queue()

    class Channel:
        def stream_unary(self, *_: Any, **__: Any) -> Any:
            return self.call

        def call(self, *, timeout: float) -> Any:
            timeouts.put_nowait(timeout)
            raise UnavailableError("enough")

    sender = KvSender(rank=0, channels=lambda _: cast("Any", Channel()), mover_choice="grpc_push")
    await sender.start()
    sender.begin(grant(), plan_handoff(LAYOUT, DESTINATION, 0, 40), 2, ROW_BYTES)
    assert await asyncio.wait_for(timeouts.get(), 5) >= 12 * 3600
    await sender.stop()


async def test_unexpected_error_of_a_lane_fails_the_transfer() -> None:
    """dcp.md bug 45: whatever ends a lane is seen in the status, so no request waits for ever."""
    sender = begun(grant())
    await sender.start()
    async with asyncio.timeout(5):
        while sender.status(grant().transfer_id).failure is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
    failure = sender.status(grant().transfer_id).failure
    assert isinstance(failure, UnavailableError)
    await sender.stop()


def test_transfer_without_rows_on_this_rank_is_complete_at_once() -> None:
    sender = KvSender(rank=0, channels=no_channel)
    sender.begin(grant(), [], 2, ROW_BYTES)
    assert sender.status(grant().transfer_id) == (0, 0, 0, 0.0, None)
    assert sender.status(grant().transfer_id).is_complete


def test_totals_are_known_from_the_start() -> None:
    assert begun(grant()).status(grant().transfer_id).num_rows_total == 2 * 40


def test_unknown_transfers_are_harmless() -> None:
    sender = KvSender(rank=0, channels=no_channel)
    sender.add_positions(b"?" * 16, 5)
    sender.cancel(b"?" * 16)
    sender.forget(b"?" * 16)
    assert isinstance(sender.status(b"?" * 16).failure, LeaseLostError)


def test_forgotten_id_can_be_used_again_and_a_used_one_cannot() -> None:
    sender = begun(grant())
    with pytest.raises(ValueError, match="has begun already"):
        sender.begin(grant(), [], 2, ROW_BYTES)
    sender.forget(grant().transfer_id)
    sender.begin(grant(), [], 2, ROW_BYTES)


def test_runs_of_another_rank_are_refused() -> None:
    sender = KvSender(rank=0, channels=no_channel)
    run = RowRun(1, 0, range(1), np.arange(3, dtype=np.int32))
    with pytest.raises(ValueError, match="runs of rank 1"):
        sender.begin(grant(), [run], 2, ROW_BYTES)


def test_cancelled_rows_leave_the_outbox_before_the_start_too() -> None:
    sender = begun(grant(), max_outbox_bytes=128)
    sender.add_positions(grant().transfer_id, 40)
    sender.pump(gather, 1 << 20)
    sender.forget(grant().transfer_id)
    sender.begin(grant(), plan_handoff(LAYOUT, DESTINATION, 0, 40), 2, ROW_BYTES)
    sender.add_positions(grant().transfer_id, 40)
    assert sender.pump(gather, 1 << 20) == 128
