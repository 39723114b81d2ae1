"""The handshake of a decode worker with a draft service."""

from __future__ import annotations

from dataclasses import dataclass

from kvbraid.errors import IncompatibleError
from kvbraid.transport.draft_grant import ROW_DTYPES
from kvbraid.transport.draft_rows import RowFormat
from kvbraid.v1 import draft_pb2 as pb

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class DraftPeer:
    """Who wants drafts.

    incarnation: of the decode worker. drafter_digest: of the drafter whose fc it applies.
    max_draft_tokens: most that it will ask for.
    """

    incarnation: int
    target_digest: str
    drafter_digest: str
    vocab_size: int
    max_draft_tokens: int


@dataclass(frozen=True, slots=True)
class DraftTerms:
    """What a draft service has, see draft.proto. epoch: its incarnation. address: its own,
    host:port; empty where only the one that was called is known."""

    epoch: int
    drafter_kind: str
    drafter_digest: str
    target_digest: str
    hidden_size: int
    row_dtype: str
    tap_layers: tuple[int, ...]
    max_draft_tokens: int
    predicts_from_anchor: bool
    vocab_size: int
    draft_vocab_size: int
    max_rows_per_message: int
    max_sequences: int
    max_position: int
    address: str = ""

    @property
    def row_format(self) -> RowFormat:
        """Its rows."""
        return RowFormat(self.hidden_size, self.row_dtype)


@dataclass(frozen=True, slots=True)
class LocalSocketOffer:
    """A way for one stream's messages on one host, see draft.proto."""

    host_id: str
    socket_name: str
    token: bytes

    def write(self, into: pb.DraftTerms) -> None:
        """Make it a part of the answer to hello."""
        into.local.host_id = self.host_id
        into.local.socket_name = self.socket_name
        into.local.token = self.token


@dataclass(frozen=True, slots=True)
class TcpOffer:
    """A way for one stream's messages between hosts, see draft.proto."""

    address: str
    token: bytes

    def write(self, into: pb.DraftTerms) -> None:
        """Make it a part of the answer to hello."""
        into.tcp.address = self.address
        into.tcp.token = self.token


@dataclass(frozen=True, slots=True)
class SocketOffers:
    """The ways beside gRPC that a service offers one stream; None: not this one."""

    local: LocalSocketOffer | None
    tcp: TcpOffer | None


def misfits(peer: DraftPeer, terms: DraftTerms) -> list[str]:
    """Every reason why `peer` cannot be served on `terms`; both sides ask."""
    pairs = (
        ("target digest", peer.target_digest, terms.target_digest),
        ("drafter digest", peer.drafter_digest, terms.drafter_digest),
        ("vocabulary size", peer.vocab_size, terms.vocab_size),
    )
    return [
        f"{name} of the worker {mine} is not the draft service's {its}"
        for name, mine, its in pairs
        if mine != its
    ]


def hello_to_proto(peer: DraftPeer) -> pb.DraftHello:
    """The first message of a stream."""
    return pb.DraftHello(
        protocol_version=PROTOCOL_VERSION,
        incarnation=peer.incarnation,
        target_digest=peer.target_digest,
        drafter_digest=peer.drafter_digest,
        vocab_size=peer.vocab_size,
        max_draft_tokens=peer.max_draft_tokens,
    )


def hello_from_proto(message: pb.DraftHello) -> DraftPeer:
    """Who says hello. Raises IncompatibleError for another protocol."""
    _check_version(message.protocol_version)
    return DraftPeer(
        incarnation=message.incarnation,
        target_digest=message.target_digest,
        drafter_digest=message.drafter_digest,
        vocab_size=message.vocab_size,
        max_draft_tokens=message.max_draft_tokens,
    )


def terms_to_proto(terms: DraftTerms) -> pb.DraftTerms:
    """The answer to hello."""
    return pb.DraftTerms(
        protocol_version=PROTOCOL_VERSION,
        epoch=terms.epoch,
        drafter_kind=terms.drafter_kind,
        drafter_digest=terms.drafter_digest,
        target_digest=terms.target_digest,
        hidden_size=terms.hidden_size,
        row_dtype=terms.row_dtype,
        tap_layers=terms.tap_layers,
        max_draft_tokens=terms.max_draft_tokens,
        predicts_from_anchor=terms.predicts_from_anchor,
        vocab_size=terms.vocab_size,
        draft_vocab_size=terms.draft_vocab_size,
        max_rows_per_message=terms.max_rows_per_message,
        max_sequences=terms.max_sequences,
        max_position=terms.max_position,
        address=terms.address,
    )


def offers_from_proto(message: pb.DraftTerms) -> SocketOffers:
    """What a service offers with its terms."""
    local, tcp = message.local, message.tcp
    return SocketOffers(
        LocalSocketOffer(local.host_id, local.socket_name, local.token)
        if message.HasField("local")
        else None,
        TcpOffer(tcp.address, tcp.token) if message.HasField("tcp") else None,
    )


def terms_from_proto(message: pb.DraftTerms) -> DraftTerms:
    """The terms of a service. Raises IncompatibleError for another protocol or impossible values:
    they come from a peer."""
    _check_version(message.protocol_version)
    if message.row_dtype not in ROW_DTYPES:
        raise IncompatibleError(f"row_dtype {message.row_dtype!r}, accepted: {ROW_DTYPES}")
    for name in ("hidden_size", "max_rows_per_message", "max_sequences"):
        if getattr(message, name) < 1:
            raise IncompatibleError(f"{name} {getattr(message, name)} must be >= 1")
    return DraftTerms(
        epoch=message.epoch,
        drafter_kind=message.drafter_kind,
        drafter_digest=message.drafter_digest,
        target_digest=message.target_digest,
        hidden_size=message.hidden_size,
        row_dtype=message.row_dtype,
        tap_layers=tuple(message.tap_layers),
        max_draft_tokens=message.max_draft_tokens,
        predicts_from_anchor=message.predicts_from_anchor,
        vocab_size=message.vocab_size,
        draft_vocab_size=message.draft_vocab_size,
        max_rows_per_message=message.max_rows_per_message,
        max_sequences=message.max_sequences,
        max_position=message.max_position,
        address=message.address,
    )


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise IncompatibleError(
            f"protocol version {version} of the peer, accepted: {PROTOCOL_VERSION}"
        )
