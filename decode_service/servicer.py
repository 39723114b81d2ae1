"""DecodeService: decode the message, run the generation, encode what happened."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from decode_service.worker import DecodeWorker, Generation
from kvbraid.engine.events import GrantReady, TokensReady
from kvbraid.errors import LeaseLostError
from kvbraid.transport.wire import grant_to_proto
from kvbraid.v1 import decode_pb2, decode_pb2_grpc
from kvbraid.wire import fill_chunk, ref_from_proto, sampling_from_proto

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """The gRPC edge of a decode worker."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        """See decode.proto."""
        generation = Generation(
            ref=ref_from_proto(request.ref),
            index=request.index,
            token_ids=tuple(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=sampling_from_proto(request.sampling),
            cache_salt=request.cache_salt,
            expect_handoff=request.expect_handoff,
        )
        is_first = True
        async with aclosing(self._worker.generate(generation)) as events:
            async for event in events:
                yield _response(event, with_cached=is_first)
                is_first = False

    async def Start(
        self, request: decode_pb2.StartRequest, context: Context
    ) -> decode_pb2.StartResponse:
        """See decode.proto."""
        if len(request.transfer_id) != 16:
            raise LeaseLostError(f"transfer_id has {len(request.transfer_id)} bytes, not 16")
        self._worker.start(
            ref_from_proto(request.ref),
            request.index,
            request.transfer_id,
            request.first_token_id,
        )
        return decode_pb2.StartResponse()

    async def Abort(
        self, request: decode_pb2.AbortRequest, context: Context
    ) -> decode_pb2.AbortResponse:
        """See decode.proto."""
        found = await self._worker.abort(ref_from_proto(request.ref), request.index)
        return decode_pb2.AbortResponse(found=found)


def _response(event: GrantReady | TokensReady, *, with_cached: bool) -> decode_pb2.DecodeResponse:
    response = decode_pb2.DecodeResponse()
    if with_cached:
        response.num_cached_tokens = event.num_cached_tokens
    if isinstance(event, GrantReady):
        response.grant.CopyFrom(grant_to_proto(event.grant))
    else:
        fill_chunk(response.chunk, event.chunk)
    return response
