"""Permission to write the KV of one request into one worker."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvbraid.errors import IncompatibleError
from kvbraid.kv.kv_layout import KvLayout
from kvbraid.transport.draft_grant import DraftGrant

TRANSFER_ID_BYTES = 16


def new_transfer_id() -> bytes:
    """128 random bits, so that no id is ever used for two transfers."""
    return secrets.token_bytes(TRANSFER_ID_BYTES)


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """Where one rank takes rows.

    host_id: equal on both sides when shared memory reaches the peer (`staging.host_id`).
    ring_name: prefix of the shared-memory slots, "" when there are none. slot_bytes: size of a
    slot, the largest payload of a frame.
    """

    rank: int
    address: str
    host_id: str
    ring_name: str
    ring_slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Positions [first_position, end_position) of one request may be written until the lease ends.

    incarnation: of the receiving worker. generation: of the pages behind the grant.
    layout: of the receiver. endpoints: one a rank. lease_ms: the grant ends when nothing arrived
    for this long. draft: where the sender's rank 0 pushes rows for the drafter.
    Raises IncompatibleError for impossible values: a grant comes from a peer.
    """

    transfer_id: bytes
    incarnation: int
    generation: int
    first_position: int
    end_position: int
    layout: KvLayout
    endpoints: tuple[RankEndpoint, ...]
    lease_ms: int
    draft: DraftGrant | None = None

    def __post_init__(self) -> None:
        if len(self.transfer_id) != TRANSFER_ID_BYTES:
            raise IncompatibleError(f"transfer id must have 16 bytes, got {len(self.transfer_id)}")
        if not 0 <= self.first_position <= self.end_position < 1 << 31:
            raise IncompatibleError(
                f"positions [{self.first_position}, {self.end_position}) must lie in [0, 2^31)"
            )
        ranks = [endpoint.rank for endpoint in self.endpoints]
        if ranks != list(range(self.layout.tp_size)):
            raise IncompatibleError(
                f"endpoints of ranks {ranks} do not cover tp_size {self.layout.tp_size} in order"
            )
        if self.lease_ms < 1:
            raise IncompatibleError(f"lease_ms {self.lease_ms} must be >= 1")

    def to_json(self) -> dict[str, Any]:
        """A JSON value for other ranks; `from_json` reads it. `draft` is rank 0's alone and stays
        out."""
        whole = asdict(replace(self, draft=None)) | {"transfer_id": self.transfer_id.hex()}
        del whole["draft"]
        return whole

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Grant:
        """The grant that `to_json` wrote."""
        fields = dict(value)
        fields["transfer_id"] = bytes.fromhex(fields["transfer_id"])
        fields["layout"] = KvLayout(**fields["layout"])
        fields["endpoints"] = tuple(RankEndpoint(**e) for e in fields["endpoints"])
        return cls(**fields)
