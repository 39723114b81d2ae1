"""Grants and layouts as messages."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kvbraid.errors import IncompatibleError
from kvbraid.kv.handoff import KvLayout
from kvbraid.transport.grant import Grant, RankEndpoint
from kvbraid.transport.mover import choose_mover, movers_used
from kvbraid.transport.wire import grant_from_proto, grant_to_proto, layout_from_proto
from kvbraid.v1 import kv_transfer_pb2 as pb

# Every field has a value of its own, so that a swapped pair is noticed.
LAYOUT = KvLayout("gqa", 61, 3, 9, 128, "bfloat16", 4, 2, 16, 8, "digest")
ENDPOINTS = tuple(
    RankEndpoint(rank, f"10.0.0.{rank}:5{rank}", "host", f"kvbraid-ring-{rank}", 8, 1 << 20)
    for rank in range(4)
)
GRANT = Grant(bytes(range(16)), 2**63 + 1, 7, 33, 900, LAYOUT, ENDPOINTS, 30_000)


def test_grant_survives_the_wire() -> None:
    message = pb.KvGrant.FromString(grant_to_proto(GRANT).SerializeToString())
    assert grant_from_proto(message) == GRANT


@pytest.mark.parametrize(
    ("message", "cls"),
    [(pb.KvGrant, Grant), (pb.KvLayout, KvLayout), (pb.RankEndpoint, RankEndpoint)],
)
def test_messages_and_domain_types_have_the_same_fields(
    message: type[pb.KvGrant], cls: type[Grant]
) -> None:
    assert [f.name for f in message.DESCRIPTOR.fields] == [f.name for f in fields(cls)]


def test_impossible_layout_of_a_peer_is_incompatible() -> None:
    message = grant_to_proto(GRANT).layout
    message.dcp_size = 3
    with pytest.raises(IncompatibleError, match="dcp_size 3 must divide tp_size 4"):
        layout_from_proto(message)
    with pytest.raises(IncompatibleError, match="kind ''"):
        layout_from_proto(pb.KvLayout())


@pytest.mark.parametrize(
    ("choice", "ring_name", "host", "expected"),
    [
        ("auto", "kvbraid-ring-1", "here", "shared_memory"),
        ("auto", "", "here", "grpc_push"),
        ("auto", "kvbraid-ring-1", "there", "grpc_push"),
        ("grpc_push", "kvbraid-ring-1", "here", "grpc_push"),
        ("shared_memory", "kvbraid-ring-1", "there", "shared_memory"),
    ],
)
def test_mover_is_shared_memory_only_where_it_reaches(
    choice: str, ring_name: str, host: str, expected: str
) -> None:
    endpoint = RankEndpoint(0, "h:1", host, ring_name, 4, 1024)
    assert choose_mover(choice, endpoint, "here") == expected  # type: ignore[arg-type]


def test_unknown_hosts_never_count_as_one() -> None:
    endpoint = RankEndpoint(0, "h:1", "", "kvbraid-ring-1", 4, 1024)
    assert choose_mover("auto", endpoint, "") == "grpc_push"


@pytest.mark.parametrize(
    ("choice", "hosts", "expected"),
    [
        ("auto", ("here", "here"), "shared_memory"),
        ("auto", ("there", "there"), "grpc_push"),
        ("auto", ("here", "there"), "mixed"),
        ("grpc_push", ("here", "here"), "grpc_push"),
    ],
)
def test_a_workers_mover_is_what_all_its_ranks_are_reached_by(
    choice: str, hosts: tuple[str, ...], expected: str
) -> None:
    ranks = [RankEndpoint(r, f"h:{r}", host, f"ring-{r}", 4, 1024) for r, host in enumerate(hosts)]
    assert movers_used(choice, ranks, "here") == expected  # type: ignore[arg-type]
