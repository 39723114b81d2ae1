"""A decode worker whose model is a hash."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

from kvbraid.rpc.server import RpcServer
from kvbraid.testing.fake_worker import DIGEST, Context, FakeWorker
from kvbraid.testing.handoffs import Handoffs
from kvbraid.testing.toy_model import ToyModel
from kvbraid.v1 import decode_pb2, decode_pb2_grpc, kv_transfer_pb2
from kvbraid.validation import check_token_ids, validate_sampling
from kvbraid.wire import chunk_to_proto, sampling_from_proto

_LEASE_MS = 5000


class FakeDecodeWorker(FakeWorker, decode_pb2_grpc.DecodeServiceServicer):
    """Stages of its faults: arrived, granted (the grant is sent), token (`after` tokens sent).

    active: keys (request id, attempt, index) of the requests that hold pages now.
    """

    role = "decode"

    def __init__(self, model: ToyModel, handoffs: Handoffs, **info: Any) -> None:
        super().__init__(model, **info)
        self._handoffs = handoffs
        self.requests: list[decode_pb2.DecodeRequest] = []

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        """See decode.proto."""
        self.requests.append(request)
        self.num_calls += 1
        sampling = sampling_from_proto(request.sampling)
        validate_sampling(sampling, self.model.vocab_size)
        check_token_ids(tuple(request.token_ids), self.model.vocab_size)
        await self.reach("arrived")
        key = (request.ref.request_id, request.ref.attempt, request.index)
        self.active.add(key)
        try:
            tokens = list(request.token_ids)
            num_cached = self.take_cached(tokens, request.cache_salt)
            if request.expect_handoff:
                grant = self._grant(len(tokens), num_cached)
                yield decode_pb2.DecodeResponse(grant=grant, num_cached_tokens=num_cached)
                await self.reach("granted")
                tokens.append(await self._handoffs.wait(grant.transfer_id))
            is_finished = False
            num_sent = 0
            while not is_finished:
                await self.reach("token", num_sent)
                num_new = len(tokens) - len(request.token_ids) + 1
                chunk = self.model.next_chunk(tokens, num_new, sampling, request.index)
                tokens.extend(chunk.token_ids)
                num_sent += 1
                is_finished = chunk.finish_reason is not None
                response = decode_pb2.DecodeResponse(chunk=chunk_to_proto(chunk))
                if num_sent == 1 and not request.expect_handoff:
                    response.num_cached_tokens = num_cached
                yield response
        finally:
            self.active.discard(key)

    async def Start(
        self, request: decode_pb2.StartRequest, context: Context
    ) -> decode_pb2.StartResponse:
        """See decode.proto."""
        await self.reach("start")
        self._handoffs.start(request.transfer_id, request.first_token_id)
        return decode_pb2.StartResponse()

    async def Abort(
        self, request: decode_pb2.AbortRequest, context: Context
    ) -> decode_pb2.AbortResponse:
        """See decode.proto: nothing can be aborted here but by ending the stream."""
        return decode_pb2.AbortResponse(found=False)

    def _grant(self, end_position: int, num_cached: int) -> kv_transfer_pb2.KvGrant:
        return kv_transfer_pb2.KvGrant(
            transfer_id=secrets.token_bytes(16),
            incarnation=self.info.incarnation,
            generation=1,
            first_position=num_cached,
            end_position=end_position,
            layout=kv_transfer_pb2.KvLayout(kind="gqa", model_digest=DIGEST),
            lease_ms=_LEASE_MS,
        )

    def _add_services(self, server: RpcServer) -> None:
        super()._add_services(server)
        server.add(
            decode_pb2_grpc.add_DecodeServiceServicer_to_server, self, "kvbraid.v1.DecodeService"
        )
