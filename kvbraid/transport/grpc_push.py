"""Pushes frames as raw bytes over one gRPC client stream a call: works between any two hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from kvbraid.errors import DataLossError
from kvbraid.rpc.client_errors import translated_rpc_errors
from kvbraid.transport.frame import encode_head
from kvbraid.transport.grant import RankEndpoint
from kvbraid.transport.outbox import OutFrame
from kvbraid.transport.push_service import PUSH
from kvbraid.v1.kv_transfer_pb2 import PushResponse

if TYPE_CHECKING:
    PushMethod = grpc.aio.StreamUnaryMultiCallable[bytes, PushResponse]

ChannelFactory = Callable[[str], grpc.aio.Channel]


class GrpcPushMover:
    """Mover for any peer. channels: the channel to an address, which its owner closes."""

    name = "grpc_push"

    def __init__(self, channels: ChannelFactory) -> None:
        self._channels = channels

    def open(
        self, endpoint: RankEndpoint, *, timeout_s: float, on_event: Callable[[], None]
    ) -> GrpcPushCall:
        """See Mover."""
        channel = self._channels(endpoint.address)
        method: PushMethod = channel.stream_unary(
            PUSH, response_deserializer=PushResponse.FromString
        )
        stream = method(timeout=timeout_s)
        stream.add_done_callback(lambda _: on_event())
        return GrpcPushCall(stream, endpoint.address)


class GrpcPushCall:
    """See PushCall. Rows are acknowledged all at once, at the end."""

    def __init__(self, stream: grpc.aio.StreamUnaryCall[bytes, PushResponse], peer: str) -> None:
        self._stream = stream
        self._peer = peer
        self.num_rows_acked = 0

    @property
    def has_ended(self) -> bool:
        """See PushCall."""
        return self._stream.done()

    async def send(self, frame: OutFrame) -> None:
        """See PushCall. Returns when HTTP/2 flow control has let the bytes pass."""
        head = encode_head(frame.header, frame.positions, frame.payload)
        with translated_rpc_errors(self._peer):
            try:
                await self._stream.write(b"".join((head, frame.payload)))
            except asyncio.InvalidStateError:
                # The call is over; its status says why.
                await self._stream
                raise DataLossError(f"{self._peer} ended the call before its last row") from None

    async def finish(self) -> None:
        """See PushCall."""
        with translated_rpc_errors(self._peer):
            if not self._stream.done():
                await self._stream.done_writing()
            response = await self._stream
        self.num_rows_acked = response.num_rows

    async def cancel(self) -> None:
        """See PushCall."""
        self._stream.cancel()
