"""DraftStream as a gRPC call; it also opens, outlives and ends every other way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc

from kvbraid.errors import DataLossError, UnavailableError
from kvbraid.rpc.client_errors import translated_rpc_errors
from kvbraid.speculative.proposal import DraftTask
from kvbraid.transport.draft_answers import AnsweredStep
from kvbraid.transport.draft_rows import row_carrier
from kvbraid.transport.draft_step import fill_step
from kvbraid.transport.draft_stream import SentStep, UnansweredSteps, open_request
from kvbraid.transport.draft_terms import DraftTerms
from kvbraid.v1 import draft_pb2 as pb

if TYPE_CHECKING:
    DraftCall = grpc.aio.StreamStreamCall[pb.DraftRequest, pb.DraftResponse]


class GrpcDraftStream:
    """See DraftStream. Made in the loop that it is used from, after the handshake on `call`."""

    wire = "grpc"

    def __init__(self, call: DraftCall, address: str, terms: DraftTerms) -> None:
        self.terms = terms
        self.address = address
        self._call = call
        self._carrier = row_carrier(terms.row_format)
        self._loop = asyncio.get_running_loop()
        self._unanswered = UnansweredSteps(address)
        self._outgoing: asyncio.Queue[pb.DraftRequest] = asyncio.Queue()
        self._is_closed = False

    def begin_step(self, tasks: Sequence[DraftTask], dropped: Sequence[str]) -> SentStep:
        """See DraftStream."""
        request = pb.DraftRequest()
        fill_step(request.step, tasks, dropped, epoch=self.terms.epoch, carrier=self._carrier)
        step = _AwaitedStep(len(tasks))
        self._post(request, step)
        return step

    def open_grant(self, key: str, transfer_id: bytes, end_position: int) -> None:
        """See DraftStream."""
        self._post(open_request(key, transfer_id, end_position), None)

    async def run(self) -> None:
        """See DraftStream."""
        reader = self._loop.create_task(self._read())
        writer = self._loop.create_task(self._write())
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            writer.cancel()
            self.close()
            await asyncio.wait({reader, writer})
        for task in (reader, writer):
            if not task.cancelled():
                task.result()

    def close(self) -> None:
        """See DraftStream."""
        self._is_closed = True
        self._call.cancel()
        self._unanswered.end()

    def _post(self, request: pb.DraftRequest, step: SentStep | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._enqueue, request, step)
        except RuntimeError:  # the loop has closed before the engine thread stopped
            if step is not None:
                step.resolve(None)

    def _enqueue(self, request: pb.DraftRequest, step: SentStep | None) -> None:
        if self._is_closed:
            if step is not None:
                step.resolve(None)
            return
        if step is not None:
            request.step.step_id = self._unanswered.add(step)
        self._outgoing.put_nowait(request)

    async def _write(self) -> None:
        while True:
            request = await self._outgoing.get()
            with translated_rpc_errors(self.address):
                await write_request(self._call, request, self.address)

    async def _read(self) -> None:
        while True:
            with translated_rpc_errors(self.address):
                response = await self._call.read()
            if not isinstance(response, pb.DraftResponse):
                raise UnavailableError(f"{self.address}: the draft service ended the stream")
            match response.WhichOneof("content"):
                case "answers":
                    self._unanswered.take(response.answers)
                case "goodbye":
                    return
                case other:
                    raise DataLossError(f"{self.address} sent {other} in the middle of the stream")


class _AwaitedStep(SentStep):
    """Resolved in the I/O loop. A bare lock: an Event costs four times as much."""

    def __init__(self, num_tasks: int) -> None:
        super().__init__(num_tasks)
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self, seconds: float) -> bool:
        """See SentStep."""
        return self.is_done or self._lock.acquire(timeout=seconds)

    def resolve(self, answered: AnsweredStep | None) -> None:
        """See SentStep."""
        super().resolve(answered)
        self._lock.release()


async def write_request(call: DraftCall, request: pb.DraftRequest, address: str) -> None:
    """Write one message. Raises UnavailableError or what the call failed with when it is over."""
    try:
        await call.write(request)
    except asyncio.InvalidStateError:
        # The call is over; reading from it says why.
        await call.read()
        raise UnavailableError(f"{address}: the draft service ended the stream") from None
