"""Grants of a draft service between domain type and draft.proto."""

from __future__ import annotations

from kvbraid.transport.draft_grant import DraftGrant
from kvbraid.v1 import draft_pb2 as pb


def draft_grant_to_proto(grant: DraftGrant) -> pb.DraftGrant:
    """The message of a grant."""
    return pb.DraftGrant(
        address=grant.address,
        transfer_id=grant.transfer_id,
        incarnation=grant.incarnation,
        key=grant.key,
        row_dtype=grant.row_dtype,
        max_rows_per_message=grant.max_rows_per_message,
    )


def draft_grant_from_proto(message: pb.DraftGrant) -> DraftGrant:
    """The grant of a peer's message. Raises IncompatibleError for impossible values."""
    return DraftGrant(
        address=message.address,
        transfer_id=message.transfer_id,
        incarnation=message.incarnation,
        key=message.key,
        row_dtype=message.row_dtype,
        max_rows_per_message=message.max_rows_per_message,
    )
