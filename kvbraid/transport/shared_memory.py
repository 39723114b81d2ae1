"""Pushes frames to a rank of the same host: payloads through its shared slots, control by gRPC.

A frame that waits asks for a slot; the receiver lends one; the payload is copied in and the slot
goes back with the frame's head. A slot is only held by a sender that has something to put in.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc
import numpy as np

from kvbraid.errors import KVBraidError, LeaseLostError, UnavailableError
from kvbraid.rpc.client_errors import translated_rpc_errors
from kvbraid.transport.frame import encode_head
from kvbraid.transport.grant import RankEndpoint
from kvbraid.transport.grpc_push import ChannelFactory
from kvbraid.transport.outbox import OutFrame
from kvbraid.transport.push_service import PUSH_SHARED
from kvbraid.transport.staging import ring_lives, slot_path
from kvbraid.v1.kv_transfer_pb2 import PushSharedRequest, PushSharedResponse, SharedFrame

if TYPE_CHECKING:
    SharedMethod = grpc.aio.StreamStreamMultiCallable[PushSharedRequest, PushSharedResponse]

# Most frames of one call that wait for a slot: enough to hide the round trip.
_MAX_WAITING = 8


class SharedMemoryMover:
    """Mover for peers whose slots this process can map."""

    name = "shared_memory"

    def __init__(self, channels: ChannelFactory) -> None:
        self._channels = channels

    def open(
        self, endpoint: RankEndpoint, *, timeout_s: float, on_event: Callable[[], None]
    ) -> SharedMemoryCall:
        """See Mover."""
        channel = self._channels(endpoint.address)
        method: SharedMethod = channel.stream_stream(
            PUSH_SHARED,
            request_serializer=PushSharedRequest.SerializeToString,
            response_deserializer=PushSharedResponse.FromString,
        )
        return SharedMemoryCall(method(timeout=timeout_s), endpoint, on_event)


class SharedMemoryCall:
    """See PushCall."""

    def __init__(
        self,
        stream: grpc.aio.StreamStreamCall[PushSharedRequest, PushSharedResponse],
        endpoint: RankEndpoint,
        on_event: Callable[[], None],
    ) -> None:
        self.num_rows_acked = 0
        self._stream = stream
        self._peer = endpoint.address
        self._slots = _MappedSlots(endpoint)
        self._on_event = on_event
        self._heartbeat = b""
        self._waiting: deque[OutFrame] = deque()
        self._filled: list[SharedFrame] = []
        self._num_unasked = 0
        self._is_finishing = False
        self._changed = asyncio.Event()
        self._has_news = asyncio.Event()
        self._failure: KVBraidError | None = None
        loop = asyncio.get_running_loop()
        self._reader = loop.create_task(self._read())
        self._writer = loop.create_task(self._write())

    @property
    def has_ended(self) -> bool:
        """See PushCall."""
        return self._reader.done()

    async def send(self, frame: OutFrame) -> None:
        """See PushCall. The payload is read until the frame has got its slot."""
        if frame.header.num_positions == 0:
            self._heartbeat = encode_head(frame.header, frame.positions, b"")
        else:
            self._waiting.append(frame)
            self._num_unasked += 1
        self._has_news.set()
        await self._until(lambda: len(self._waiting) < _MAX_WAITING)

    async def finish(self) -> None:
        """See PushCall."""
        await self._until(lambda: not self._waiting)
        self._is_finishing = True
        self._has_news.set()
        await asyncio.wait({self._reader})
        self._raise_failure()

    async def cancel(self) -> None:
        """See PushCall."""
        self._stream.cancel()
        self._reader.cancel()
        self._writer.cancel()
        await asyncio.wait({self._reader, self._writer})

    async def _read(self) -> None:
        try:
            with translated_rpc_errors(self._peer):
                async for response in self._stream:
                    self.num_rows_acked = response.num_rows
                    for slot in response.free_slots:
                        self._fill(slot)
                    self._changed.set()
                    self._has_news.set()
                    self._on_event()
        except KVBraidError as failure:
            self._failure = failure
        finally:
            self._changed.set()
            self._on_event()

    def _fill(self, slot: int) -> None:
        if not self._waiting:
            raise LeaseLostError(f"{self._peer} lent slot {slot}, which nobody asked for")
        frame = self._waiting.popleft()
        head = encode_head(frame.header, frame.positions, frame.payload)
        target = self._slots.view(slot)[: frame.header.payload_bytes]
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(frame.payload, np.uint8))
        self._filled.append(SharedFrame(head=head, slot=slot))

    async def _write(self) -> None:
        """One message for all that became ready while the last one was on its way."""
        # A call that is over ends the reader too, which knows why.
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            while True:
                await self._has_news.wait()
                self._has_news.clear()
                request = PushSharedRequest(
                    frames=self._filled,
                    num_slots_wanted=self._num_unasked,
                    heartbeat=self._heartbeat,
                )
                self._filled, self._num_unasked, self._heartbeat = [], 0, b""
                if request.ByteSize():
                    await self._stream.write(request)
                if self._is_finishing and not self._filled:
                    await self._stream.done_writing()
                    return

    async def _until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            if self._reader.done():
                self._raise_failure()
                raise LeaseLostError(f"{self._peer} ended the call before its last row")
            self._changed.clear()
            await self._changed.wait()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._reader.cancelled():
            raise UnavailableError(f"{self._peer}: the channel was closed")


class _MappedSlots:
    """Slots of one receiver's ring, mapped on first use."""

    def __init__(self, endpoint: RankEndpoint) -> None:
        self._endpoint = endpoint
        self._views: dict[int, memoryview] = {}

    def view(self, slot: int) -> memoryview:
        """The slot's memory.

        Raises LeaseLostError when the receiver has taken the slot back since it lent it, and
        UnavailableError when its ring is gone or out of reach.
        """
        view = self._views.get(slot)
        if view is None:
            view = self._views[slot] = self._map(slot)
        return view

    def _map(self, slot: int) -> memoryview:
        size = self._endpoint.slot_bytes
        try:
            fd = os.open(slot_path(self._endpoint.ring_name, slot), os.O_RDWR)
        except (OSError, ValueError) as error:
            # The loan and the end of the call that took it back cross: either may come first.
            if isinstance(error, FileNotFoundError) and ring_lives(self._endpoint.ring_name):
                raise LeaseLostError(
                    f"{self._endpoint.address} took slot {slot} back before it was filled"
                ) from error
            raise UnavailableError(
                f"{self._endpoint.address}: slot {slot} cannot be mapped: {error}"
            ) from error
        try:
            return memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE))
        except (OSError, ValueError) as error:
            raise UnavailableError(
                f"{self._endpoint.address}: slot {slot} is not {size} bytes: {error}"
            ) from error
        finally:
            os.close(fd)
