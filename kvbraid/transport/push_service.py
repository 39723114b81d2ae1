"""The gRPC side of a receiver: KvTransferService with raw-bytes frames.

server.add_generic(push_handlers(receiver), SERVICE_NAME)

Handlers raise KVBraidErrors; the server's interceptor turns them into statuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np

from kvbraid.errors import DataLossError, KVBraidError
from kvbraid.transport.frame import FrameHead, decode_frame, decode_head, is_intact
from kvbraid.transport.inbound import InboundCall
from kvbraid.transport.receiver import KvReceiver
from kvbraid.v1.kv_transfer_pb2 import (
    PushResponse,
    PushSharedRequest,
    PushSharedResponse,
)

SERVICE_NAME = "kvbraid.v1.KvTransferService"
PUSH = f"/{SERVICE_NAME}/Push"
PUSH_SHARED = f"/{SERVICE_NAME}/PushShared"
# How often a call that waits for a slot renews its lease: it is we who keep it waiting.
_RENEW_SECONDS = 0.1

Context = grpc.aio.ServicerContext[Any, Any]


def push_handlers(receiver: KvReceiver) -> list[grpc.GenericRpcHandler]:
    """Handlers of KvTransferService that stage what arrives in `receiver`."""
    service = _PushService(receiver)
    handlers = {
        "Push": grpc.stream_unary_rpc_method_handler(
            service.push, response_serializer=PushResponse.SerializeToString
        ),
        "PushShared": grpc.stream_stream_rpc_method_handler(
            service.push_shared,
            request_deserializer=PushSharedRequest.FromString,
            response_serializer=PushSharedResponse.SerializeToString,
        ),
    }
    return [grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)]


class _PushService:
    def __init__(self, receiver: KvReceiver) -> None:
        self._receiver = receiver

    async def push(self, frames: AsyncIterator[bytes], context: Context) -> PushResponse:
        call = InboundCall()
        num_rows = await self._receiver.supervise(call, self._take_frames(call, frames))
        return PushResponse(num_rows=num_rows)

    async def push_shared(
        self, requests: AsyncIterator[PushSharedRequest], context: Context
    ) -> None:
        call = InboundCall()
        await self._receiver.supervise(call, self._exchange(call, requests, context))

    async def _take_frames(self, call: InboundCall, frames: AsyncIterator[bytes]) -> int:
        receiver = self._receiver
        async for frame in frames:
            head, payload = decode_frame(frame)
            if len(head.positions) == 0:
                self._take_heartbeat(call, head)
                continue
            receiver.admit(call, head.header)
            slot = await self._slot(call)
            target = np.frombuffer(receiver.ring.view(slot), np.uint8, payload.nbytes)
            np.copyto(target, np.frombuffer(payload, np.uint8))
            receiver.stage(call, head, slot)
        await call.settled()
        return call.num_rows

    async def _exchange(
        self, call: InboundCall, requests: AsyncIterator[PushSharedRequest], context: Context
    ) -> None:
        reader = asyncio.get_running_loop().create_task(self._read_shared(call, requests))
        try:
            while not reader.done():
                await call.changed.wait()
                call.changed.clear()
                slots = await self._lend_slots(call)
                # Rows are told along with slots: a message for each frame would cost as much as
                # the frame.
                if slots:
                    await _tell(context, call, slots)
            await call.settled()
            await _tell(context, call, [])
        finally:
            reader.cancel()
            await asyncio.wait({reader})

    async def _read_shared(
        self, call: InboundCall, requests: AsyncIterator[PushSharedRequest]
    ) -> None:
        try:
            async for request in requests:
                self._take_shared(call, request)
        except KVBraidError as error:
            call.fail(error)
        finally:
            call.changed.set()

    def _take_shared(self, call: InboundCall, request: PushSharedRequest) -> None:
        receiver = self._receiver
        if request.heartbeat:
            self._take_heartbeat(call, decode_head(request.heartbeat))
        if call.transfer_id is None:
            raise DataLossError("the call has not named its transfer")
        receiver.grants.touch(call.transfer_id)
        for frame in request.frames:
            if frame.slot not in call.slots:
                raise DataLossError(f"slot {frame.slot} was not given to this call")
            call.slots.remove(frame.slot)
            self._stage_shared(call, frame.head, frame.slot)
        call.num_slots_wanted += request.num_slots_wanted
        call.changed.set()

    def _take_heartbeat(self, call: InboundCall, head: FrameHead) -> None:
        if not is_intact(head, b""):
            raise DataLossError("a heartbeat is damaged")
        self._receiver.admit(call, head.header)

    def _stage_shared(self, call: InboundCall, data: bytes, slot: int) -> None:
        try:
            head = decode_head(data)
            self._receiver.admit(call, head.header)
        except KVBraidError:
            self._receiver.slots.release(slot)
            raise
        self._receiver.stage(call, head, slot)

    async def _lend_slots(self, call: InboundCall) -> list[int]:
        """Slots that the call gets now: at least one if it wants any, never more than half of
        the ring, so that one that stands still does not stop the others."""
        most = max(1, self._receiver.ring.num_slots // 2) - len(call.slots)
        num_wanted = min(call.num_slots_wanted, most)
        if num_wanted <= 0:
            return []
        slots = [await self._slot(call)]
        while len(slots) < num_wanted:
            extra = self._receiver.slots.try_acquire()
            if extra is None:
                call.changed.set()
                break
            slots.append(extra)
        call.slots.update(slots)
        call.num_slots_wanted -= len(slots)
        return slots

    async def _slot(self, call: InboundCall) -> int:
        return await self._receiver.slots.acquire(
            lambda: self._receiver.grants.touch(call.transfer_id or b""), _RENEW_SECONDS
        )


async def _tell(context: Context, call: InboundCall, slots: list[int]) -> None:
    """Write, to the end even when cancelled: a call with a write under way cannot be aborted."""
    response = PushSharedResponse(free_slots=slots, num_rows=call.num_rows)
    writing = asyncio.ensure_future(context.write(response))
    try:
        await asyncio.shield(writing)
    finally:
        await asyncio.wait({writing})
        # Whoever was cancelled has no use for it, but unseen it would be logged as an error.
        writing.exception()
