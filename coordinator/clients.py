"""Typed clients of the other services: domain types in and out, KVBraid's own errors.

Every call has a timeout. A call ends when it is read to its end, fails or is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar, cast

import grpc
from grpc_health.v1 import health_pb2

from coordinator.messages import FirstToken, HandoffDone, SequenceRequest, WorkerInfo
from kvbraid.errors import RequestCancelledError, UnavailableError
from kvbraid.request import RequestRef, TokenChunk
from kvbraid.rpc.channels import ChannelPool
from kvbraid.rpc.client_errors import translated_rpc_errors
from kvbraid.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    info_pb2,
    info_pb2_grpc,
    kv_transfer_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
)
from kvbraid.wire import chunk_from_proto, ref_to_proto, sampling_to_proto

Message = TypeVar("Message")

Grant = kv_transfer_pb2.KvGrant
"""Goes from a decode worker to a prefill worker as it is; the coordinator does not look inside."""


class _StreamCall(Generic[Message]):
    """A server stream read message by message."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[Any, Message], peer: str) -> None:
        self._call = call
        self._ended_by: BaseException | None = None
        self._translated_errors = translated_rpc_errors(peer)
        self.peer = peer

    async def next_message(self) -> Message | None:
        """The next message, None at the end. Raises the peer's error, or what `end` was given."""
        try:
            with self._translated_errors:
                message = await self._call.read()
        except RequestCancelledError as error:
            # Nobody here cancelled it, so the peer stopped in the middle.
            raise UnavailableError(f"{self.peer}: stopped the call: {error}") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._ended_by is not None and task is not None and not task.cancelling():
                raise self._ended_by from None
            raise
        return None if message is grpc.aio.EOF else cast(Message, message)

    def end(self, reason: BaseException) -> None:
        """Cancels the call; who reads it gets `reason`."""
        self._ended_by = self._ended_by or reason
        self._call.cancel()

    def cancel(self) -> None:
        """Cancels the call if it still runs; the peer frees what it held."""
        self._call.cancel()


class DecodeCall:
    """A running Decode stream."""

    def __init__(
        self,
        stub: decode_pb2_grpc.DecodeServiceAsyncStub,
        request: SequenceRequest,
        peer: str,
        *,
        expect_handoff: bool,
        timeout_s: float,
    ) -> None:
        self._stub = stub
        self._request = request
        message = decode_pb2.DecodeRequest(
            ref=ref_to_proto(request.ref),
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=sampling_to_proto(request.sampling),
            cache_salt=request.cache_salt,
            expect_handoff=expect_handoff,
            index=request.index,
        )
        call = stub.Decode(message, timeout=timeout_s, metadata=_metadata(request.ref))
        self._stream: _StreamCall[decode_pb2.DecodeResponse] = _StreamCall(call, peer)
        self.num_cached_tokens = 0
        self.end = self._stream.end
        self.cancel = self._stream.cancel

    async def grant(self) -> Grant:
        """The first message of a call that expects a handoff."""
        message = await self._stream.next_message()
        if message is None or not message.HasField("grant"):
            raise UnavailableError(f"{self._stream.peer}: no grant came first")
        self._note_cached(message)
        return message.grant

    async def read(self) -> TokenChunk | None:
        """The next tokens, None at the end of the stream."""
        message = await self._stream.next_message()
        if message is None:
            return None
        self._note_cached(message)
        return chunk_from_proto(message.chunk)

    async def start(self, grant: Grant, first_token_id: int, *, timeout_s: float) -> None:
        """Gives the decode worker the first token of the handed-off prompt."""
        request = self._request
        message = decode_pb2.StartRequest(
            ref=ref_to_proto(request.ref),
            index=request.index,
            transfer_id=grant.transfer_id,
            first_token_id=first_token_id,
        )
        with translated_rpc_errors(self._stream.peer):
            await self._stub.Start(message, timeout=timeout_s, metadata=_metadata(request.ref))

    def _note_cached(self, message: decode_pb2.DecodeResponse) -> None:
        if message.HasField("num_cached_tokens"):
            self.num_cached_tokens = message.num_cached_tokens


class PrefillCall:
    """A running Prefill stream."""

    def __init__(
        self,
        stub: prefill_pb2_grpc.PrefillServiceAsyncStub,
        request: SequenceRequest,
        grant: Grant,
        peer: str,
        *,
        timeout_s: float,
    ) -> None:
        message = prefill_pb2.PrefillRequest(
            ref=ref_to_proto(request.ref),
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=sampling_to_proto(request.sampling),
            cache_salt=request.cache_salt,
            grant=grant,
            index=request.index,
        )
        call = stub.Prefill(message, timeout=timeout_s, metadata=_metadata(request.ref))
        self._stream: _StreamCall[prefill_pb2.PrefillResponse] = _StreamCall(call, peer)
        self.peer = peer
        self.cancel = self._stream.cancel

    async def events(self) -> AsyncIterator[FirstToken | HandoffDone]:
        """The first token, then the end of the handoff."""
        while (message := await self._stream.next_message()) is not None:
            if message.HasField("first"):
                yield FirstToken(chunk_from_proto(message.first), message.num_cached_tokens)
            elif message.HasField("done"):
                done = message.done
                yield HandoffDone(done.num_bytes, done.queue_us / 1e6, done.compute_us / 1e6)


class DecodeClient:
    """Calls one decode worker."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._address = address

    def open(
        self, request: SequenceRequest, *, expect_handoff: bool, timeout_s: float
    ) -> DecodeCall:
        """Begins a Decode stream; cancelling it frees the request's pages."""
        return DecodeCall(
            self._stub, request, self._address, expect_handoff=expect_handoff, timeout_s=timeout_s
        )


class PrefillClient:
    """Calls one prefill worker."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._address = address

    def open(self, request: SequenceRequest, grant: Grant, *, timeout_s: float) -> PrefillCall:
        """Begins to compute a prompt and push its KV where `grant` says."""
        return PrefillCall(self._stub, request, grant, self._address, timeout_s=timeout_s)


class WorkerClients:
    """One client an address, made on first use over pooled channels."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels
        self._decode: dict[str, DecodeClient] = {}
        self._prefill: dict[str, PrefillClient] = {}

    def decode(self, address: str) -> DecodeClient:
        """The client of a decode worker."""
        if address not in self._decode:
            self._decode[address] = DecodeClient(self._channels.channel(address), address)
        return self._decode[address]

    def prefill(self, address: str) -> PrefillClient:
        """The client of a prefill worker."""
        if address not in self._prefill:
            self._prefill[address] = PrefillClient(self._channels.channel(address), address)
        return self._prefill[address]

    def info(self, address: str) -> InfoClient:
        """A client for the health and load of any worker."""
        return InfoClient(self._channels.channel(address), address)


class InfoClient:
    """Asks one process how it is."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._info = info_pb2_grpc.InfoServiceStub(channel)
        self._watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        self._address = address

    async def info(self, *, timeout_s: float) -> WorkerInfo:
        """What the process says of itself."""
        with translated_rpc_errors(self._address):
            message = await self._info.Info(info_pb2.InfoRequest(), timeout=timeout_s)
        return WorkerInfo(
            role=message.role,
            incarnation=message.incarnation,
            model=message.model,
            model_digest=message.model_digest,
            max_model_len=message.max_model_len,
            num_pool_tokens=message.num_pool_tokens,
            num_free_tokens=message.num_free_tokens,
            num_running=message.num_running,
            num_waiting=message.num_waiting,
            max_num_seqs=message.max_num_seqs,
            num_queued_prompt_tokens=message.num_queued_prompt_tokens,
        )

    async def watch_health(self) -> AsyncIterator[bool]:
        """Whether the process serves, now and at every change. Ends or raises when it is gone."""
        serving = health_pb2.HealthCheckResponse.SERVING
        with translated_rpc_errors(self._address):
            call = self._watch(health_pb2.HealthCheckRequest(service=""))
            try:
                async for message in call:
                    yield message.status == serving
            finally:
                call.cancel()


def _metadata(ref: RequestRef) -> tuple[tuple[str, str], ...]:
    # Metadata takes printable ASCII only; the id itself travels in the message.
    return (("x-request-id", ref.request_id),) if ref.request_id.isascii() else ()
