"""A prefill worker whose model is a hash."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kvbraid.rpc.server import RpcServer
from kvbraid.testing.fake_worker import Context, FakeWorker
from kvbraid.testing.handoffs import Handoffs
from kvbraid.testing.toy_model import ToyModel
from kvbraid.v1 import prefill_pb2, prefill_pb2_grpc
from kvbraid.wire import chunk_to_proto, sampling_from_proto


class FakePrefillWorker(FakeWorker, prefill_pb2_grpc.PrefillServiceServicer):
    """Stages of its faults: arrived, first (the first token is sent), sent (the rows are sent)."""

    role = "prefill"

    def __init__(self, model: ToyModel, handoffs: Handoffs, **info: Any) -> None:
        super().__init__(model, **info)
        self._handoffs = handoffs
        self.requests: list[prefill_pb2.PrefillRequest] = []

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """See prefill.proto."""
        self.requests.append(request)
        self.num_calls += 1
        await self.reach("arrived")
        key = (request.ref.request_id, request.ref.attempt, request.index)
        self.active.add(key)
        try:
            tokens = tuple(request.token_ids)
            num_cached = self.take_cached(tokens, request.cache_salt)
            sampling = sampling_from_proto(request.sampling)
            first = self.model.next_chunk(tokens, 1, sampling, request.index)
            yield prefill_pb2.PrefillResponse(
                first=chunk_to_proto(first), num_cached_tokens=num_cached
            )
            if first.finish_reason is not None:
                return
            await self.reach("first")
            self._handoffs.rows_landed(request.grant.transfer_id)
            await self.reach("sent")
            num_rows = request.grant.end_position - request.grant.first_position
            yield prefill_pb2.PrefillResponse(done=prefill_pb2.HandoffDone(num_rows=num_rows))
        finally:
            self.active.discard(key)

    def _add_services(self, server: RpcServer) -> None:
        super()._add_services(server)
        server.add(
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
            self,
            "kvbraid.v1.PrefillService",
        )
