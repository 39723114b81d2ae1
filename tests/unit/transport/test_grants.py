"""Which frames a rank takes, and which rows it counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvbraid.errors import DataLossError, IncompatibleError, KVBraidError, LeaseLostError
from kvbraid.kv.handoff import KvLayout
from kvbraid.transport.frame import FrameHead, FrameHeader
from kvbraid.transport.grants import Grant, GrantTable, RankEndpoint, new_transfer_id

LAYOUT = KvLayout("gqa", 4, 4, 8, 16, "float32", 4, 2, 4, 1, "digest")
ENDPOINTS = tuple(RankEndpoint(rank, f"h:{rank}", "host", "", 4, 1024) for rank in range(4))
GRANT = Grant(b"i" * 16, 11, 5, 3, 20, LAYOUT, ENDPOINTS, 1000)
# Rank 3 is group 1, dcp rank 1: heads 2 and 3, odd positions 3, 5, ... 19.
RANK = 3


class Clock:
    """Time that stands still until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> GrantTable:
    table = GrantTable(rank=RANK, incarnation=11, clock=clock)
    table.open(GRANT)
    return table


def frame(
    positions: list[int], layers: range = range(4), heads: range = range(2, 4), **changes: Any
) -> FrameHead:
    header = FrameHeader(
        src_rank=0,
        dst_rank=RANK,
        transfer_id=GRANT.transfer_id,
        incarnation=11,
        generation=5,
        number=0,
        layer_start=layers.start,
        num_layers=len(layers),
        head_start=heads.start,
        num_heads=len(heads),
        num_positions=len(positions),
        payload_bytes=len(layers) * len(heads) * len(positions) * 64,
    )
    return FrameHead(replace(header, **changes), np.array(positions, dtype=np.int32))


def test_rows_count_layer_position_and_head_once(table: GrantTable) -> None:
    assert table.rows_expected(GRANT.transfer_id) == 4 * 9 * 2
    table.record(frame([3, 5], range(1), range(2, 3)))
    table.record(frame([3, 5], range(1), range(3, 4)))
    table.record(frame([3, 5], range(1, 4)))
    assert table.rows_landed(GRANT.transfer_id) == 2 + 2 + 12


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"transfer_id": b"x" * 16}, LeaseLostError, "not open on rank 3"),
        ({"incarnation": 10}, LeaseLostError, "incarnation 10, not 11"),
        ({"generation": 4}, DataLossError, "generation 5, frame 0 has 4"),
        ({"dst_rank": 2}, DataLossError, "frame for rank 2 arrived at rank 3"),
        ({"layer_start": 1}, DataLossError, r"layers 1 \+ 4 exceed 4"),
        ({"head_start": 1}, DataLossError, r"heads 1\.\.3 are not among range\(2, 4\)"),
        ({"head_start": 3}, DataLossError, r"heads 3\.\.5"),
        ({"payload_bytes": 1023}, DataLossError, "16 rows of 64 bytes are not 1023"),
    ],
    ids=str,
)
def test_foreign_frames_are_refused_before_they_are_staged(
    table: GrantTable, changes: dict[str, Any], error: type[KVBraidError], message: str
) -> None:
    with pytest.raises(error, match=message):
        table.check(frame([3, 5], **changes).header)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([1, 3], r"outside \[3, 20\)"),
        ([19, 21], r"outside \[3, 20\)"),
        ([3, 4], "not all owned by rank 3"),
        ([5, 3], "not ascending"),
        ([3, 3], "not ascending"),
    ],
)
def test_positions_that_are_not_the_ranks_are_never_written(
    table: GrantTable, positions: list[int], message: str
) -> None:
    with pytest.raises(DataLossError, match=message):
        table.record(frame(positions))
    assert table.rows_landed(GRANT.transfer_id) == 0


def test_replayed_row_is_refused_whatever_frame_it_comes_in(table: GrantTable) -> None:
    table.record(frame([3, 5, 7]))
    with pytest.raises(DataLossError, match="frame 8 repeats rows"):
        table.record(frame([7, 9], range(2, 3), range(3, 4), number=8))
    assert table.rows_landed(GRANT.transfer_id) == 24
    table.record(frame([9], range(2, 3), range(3, 4)))


def test_closed_grant_refuses_rows_that_were_checked_before(table: GrantTable) -> None:
    """serving.md 3.1: the grant is looked at again when the rows are written."""
    late = frame([3])
    table.check(late.header)
    table.close(GRANT.transfer_id)
    with pytest.raises(LeaseLostError, match="not open"):
        table.record(late)


def test_lease_ends_when_nothing_arrives_and_failure_tells_until_close(
    table: GrantTable, clock: Clock
) -> None:
    clock.now += 1.0
    assert table.expire() == []
    table.check(frame([3]).header)
    clock.now += 1.0
    assert table.expire() == []
    assert table.expire(clock.now + 0.001) == [GRANT.transfer_id]
    assert table.expire(clock.now + 0.001) == []
    assert isinstance(table.failure(GRANT.transfer_id), LeaseLostError)
    with pytest.raises(LeaseLostError, match="ran out"):
        table.record(frame([3]))
    table.close(GRANT.transfer_id)
    assert table.failure(GRANT.transfer_id) is None


@pytest.mark.parametrize(
    "renew", [lambda t: t.touch(GRANT.transfer_id), lambda t: t.record(frame([3]))]
)
def test_lease_is_renewed_by_rows_and_by_touch(
    table: GrantTable, clock: Clock, renew: Callable[[GrantTable], None]
) -> None:
    clock.now += 0.9
    renew(table)
    clock.now += 0.9
    assert table.expire() == []


def test_complete_grant_does_not_expire(table: GrantTable, clock: Clock) -> None:
    """Other ranks may still wait for theirs."""
    table.record(frame(list(range(3, 20, 2))))
    clock.now += 10
    assert table.expire() == []
    assert table.failure(GRANT.transfer_id) is None


def test_rank_without_rows_is_complete_from_the_start(clock: Clock) -> None:
    table = GrantTable(rank=1, incarnation=11, clock=clock)
    table.open(replace(GRANT, first_position=4, end_position=5))
    clock.now += 10
    assert table.expire() == []
    assert table.rows_expected(GRANT.transfer_id) == 0


def test_end_before_the_last_row_is_told_and_the_end_after_it_is_not(table: GrantTable) -> None:
    ended: list[bytes] = []
    table.on_end(lambda transfer_id, reason: ended.append(transfer_id))
    table.close(GRANT.transfer_id)
    assert ended == [GRANT.transfer_id]
    table.open(GRANT)
    table.record(frame(list(range(3, 20, 2))))
    table.close(GRANT.transfer_id)
    assert ended == [GRANT.transfer_id]


def test_first_failure_stays(table: GrantTable) -> None:
    table.fail(GRANT.transfer_id, DataLossError("first"))
    table.fail(GRANT.transfer_id, LeaseLostError("second"))
    assert str(table.failure(GRANT.transfer_id)) == "first"
    with pytest.raises(DataLossError, match="first"):
        table.check(frame([3]).header)


def test_unknown_transfers_are_harmless(table: GrantTable) -> None:
    unknown = new_transfer_id()
    table.close(unknown)
    table.touch(unknown)
    table.fail(unknown, DataLossError("x"))
    assert table.failure(unknown) is None
    assert table.rows_landed(unknown) == table.rows_expected(unknown) == 0


def test_transfer_id_cannot_be_opened_twice(table: GrantTable) -> None:
    with pytest.raises(ValueError, match="open already"):
        table.open(GRANT)


def test_transfer_ids_are_not_recycled() -> None:
    assert len({new_transfer_id() for _ in range(1000)}) == 1000


def test_grant_survives_json() -> None:
    assert Grant.from_json(GRANT.to_json()) == GRANT


@pytest.mark.parametrize(
    "changes",
    [
        {"transfer_id": b"short"},
        {"first_position": 21},
        {"end_position": 2**31},
        {"endpoints": ENDPOINTS[:3]},
        {"endpoints": ENDPOINTS[::-1]},
        {"lease_ms": 0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_impossible_grants_of_a_peer_are_incompatible(changes: dict[str, Any]) -> None:
    with pytest.raises(IncompatibleError):
        replace(GRANT, **changes)
