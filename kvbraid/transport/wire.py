"""Layouts and grants between domain types and kv_transfer.proto."""

from __future__ import annotations

from kvbraid.errors import IncompatibleError
from kvbraid.kv.kv_layout import KvLayout
from kvbraid.transport.draft_grant_wire import draft_grant_from_proto, draft_grant_to_proto
from kvbraid.transport.grant import Grant, RankEndpoint
from kvbraid.v1 import kv_transfer_pb2 as pb


def layout_to_proto(layout: KvLayout) -> pb.KvLayout:
    """The message of a layout."""
    return pb.KvLayout(
        kind=layout.kind,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        num_q_heads=layout.num_q_heads,
        row_width=layout.row_width,
        dtype=layout.dtype,
        tp_size=layout.tp_size,
        dcp_size=layout.dcp_size,
        page_size=layout.page_size,
        interleave=layout.interleave,
        model_digest=layout.model_digest,
    )


def layout_from_proto(message: pb.KvLayout) -> KvLayout:
    """The layout of a peer's message. Raises IncompatibleError for impossible values."""
    try:
        return KvLayout(
            kind=message.kind,
            num_layers=message.num_layers,
            num_kv_heads=message.num_kv_heads,
            num_q_heads=message.num_q_heads,
            row_width=message.row_width,
            dtype=message.dtype,
            tp_size=message.tp_size,
            dcp_size=message.dcp_size,
            page_size=message.page_size,
            interleave=message.interleave,
            model_digest=message.model_digest,
        )
    except ValueError as error:
        raise IncompatibleError(f"KV layout of the peer: {error}") from error


def grant_to_proto(grant: Grant) -> pb.KvGrant:
    """The message of a grant."""
    endpoints = [
        pb.RankEndpoint(
            rank=endpoint.rank,
            address=endpoint.address,
            host_id=endpoint.host_id,
            ring_name=endpoint.ring_name,
            ring_slots=endpoint.ring_slots,
            slot_bytes=endpoint.slot_bytes,
        )
        for endpoint in grant.endpoints
    ]
    return pb.KvGrant(
        transfer_id=grant.transfer_id,
        incarnation=grant.incarnation,
        generation=grant.generation,
        first_position=grant.first_position,
        end_position=grant.end_position,
        layout=layout_to_proto(grant.layout),
        endpoints=endpoints,
        lease_ms=grant.lease_ms,
        draft=None if grant.draft is None else draft_grant_to_proto(grant.draft),
    )


def grant_from_proto(message: pb.KvGrant) -> Grant:
    """The grant of a peer's message. Raises IncompatibleError for impossible values."""
    endpoints = tuple(
        RankEndpoint(
            rank=endpoint.rank,
            address=endpoint.address,
            host_id=endpoint.host_id,
            ring_name=endpoint.ring_name,
            ring_slots=endpoint.ring_slots,
            slot_bytes=endpoint.slot_bytes,
        )
        for endpoint in message.endpoints
    )
    return Grant(
        transfer_id=message.transfer_id,
        incarnation=message.incarnation,
        generation=message.generation,
        first_position=message.first_position,
        end_position=message.end_position,
        layout=layout_from_proto(message.layout),
        endpoints=endpoints,
        lease_ms=message.lease_ms,
        draft=draft_grant_from_proto(message.draft) if message.HasField("draft") else None,
    )
