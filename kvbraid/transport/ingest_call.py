"""A prefill worker's call to a draft service: the fused rows of one prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from torch import Tensor

from kvbraid.errors import LeaseLostError
from kvbraid.rpc.client_errors import translated_rpc_errors
from kvbraid.transport.draft_grant import DraftGrant
from kvbraid.transport.draft_rows import RowFormat, row_carrier
from kvbraid.v1 import draft_pb2 as pb
from kvbraid.v1.draft_pb2_grpc import DraftServiceStub

if TYPE_CHECKING:
    Call = grpc.aio.StreamUnaryCall[pb.IngestRequest, pb.IngestResponse]


@dataclass(frozen=True, slots=True)
class IngestChunk:
    """Rows on their way, packed."""

    request: pb.IngestRequest
    num_rows: int
    num_bytes: int


def ingest_chunks(
    grant: DraftGrant,
    first_position: int,
    rows: Tensor,
    next_token_ids: Sequence[int],
    *,
    starts_cold: bool = False,
) -> list[IngestChunk]:
    """`rows` [m, d] of the positions from `first_position`, each with its next token, in pieces
    that the grant's service takes. The tensor may change afterwards. From any thread."""
    row_format = RowFormat(rows.shape[1], grant.row_dtype)
    carrier = row_carrier(row_format)
    chunks = []
    for begin in range(0, rows.shape[0], grant.max_rows_per_message):
        part = rows[begin : begin + grant.max_rows_per_message]
        request = pb.IngestRequest(
            first_position=first_position + begin,
            next_token_ids=next_token_ids[begin : begin + part.shape[0]],
            starts_cold=starts_cold and begin == 0,
        )
        carrier.pack([part], request.rows)
        num_rows = part.shape[0]
        chunks.append(IngestChunk(request, num_rows, num_rows * row_format.row_bytes))
    return chunks


class IngestCall:
    """One open call. Every method raises the KVBraidError that the service ended the call with."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        grant: DraftGrant,
        *,
        drafter_digest: str,
        hidden_size: int,
        timeout_s: float,
        on_end: Callable[[], None],
    ) -> None:
        """drafter_digest, hidden_size: of the fc that made the rows. on_end: called when the call
        is over, also early; `finish` then tells why."""
        self._address = grant.address
        self._call: Call = DraftServiceStub(channel).Ingest(timeout=timeout_s)
        self._call.add_done_callback(lambda _: on_end())
        self._target: pb.IngestTarget | None = pb.IngestTarget(
            transfer_id=grant.transfer_id,
            incarnation=grant.incarnation,
            key=grant.key,
            drafter_digest=drafter_digest,
            hidden_size=hidden_size,
            row_dtype=grant.row_dtype,
        )

    async def send(self, chunk: IngestChunk) -> None:
        """Push one chunk; returns when flow control has let it pass."""
        if self._target is not None:
            chunk.request.target.CopyFrom(self._target)
            self._target = None
        with translated_rpc_errors(self._address):
            try:
                await self._call.write(chunk.request)
            except asyncio.InvalidStateError:
                # The call is over; its status says why.
                await self._call
                raise LeaseLostError(f"{self._address} ended the call early") from None

    async def finish(self) -> int:
        """Returns, once the drafter holds every row, their number."""
        with translated_rpc_errors(self._address):
            if not self._call.done():
                await self._call.done_writing()
            response = await self._call
        return response.num_rows

    def cancel(self) -> None:
        """Give the call up. Harmless after the end."""
        self._call.cancel()
