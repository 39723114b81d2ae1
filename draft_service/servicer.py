"""DraftService: decode the messages, run the steps, encode what came of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from draft_service.compute_inbox import ComputeInbox
from draft_service.sessions import Session
from draft_service.socket_connection import OnOver, SocketConnection
from draft_service.socket_listener import SocketListener, SocketPeer
from draft_service.step_answer import OnOutcome, Outcome
from draft_service.worker import DraftWorker, Step
from kvbraid.errors import InvalidRequestError, KVBraidError
from kvbraid.transport.draft_answers import AnsweredStep, fill_answers
from kvbraid.transport.draft_rows import FollowingRows, RowCarrier
from kvbraid.transport.draft_step import check_key, tasks_from_proto
from kvbraid.transport.draft_terms import hello_from_proto, terms_to_proto
from kvbraid.transport.shared_rows import SharedRows, memory_bytes
from kvbraid.transport.socket_frames import Frame
from kvbraid.v1 import draft_pb2 as pb
from kvbraid.worker.ingest_servicer import IngestServicer

Context = grpc.aio.ServicerContext[Any, Any]


class DraftServicer(IngestServicer):
    """The gRPC edge of a draft service. lease_s: longest silence of a prefill worker. address:
    where peers reach this very service, known once it listens. listeners: what decode workers may
    use beside gRPC, served by the thread of `inbox`; their owner starts and closes them."""

    def __init__(
        self,
        worker: DraftWorker,
        *,
        lease_s: float,
        address: Callable[[], str],
        inbox: ComputeInbox,
        listeners: Sequence[SocketListener] = (),
    ) -> None:
        super().__init__(worker.intake, lease_s=lease_s)
        self._worker = worker
        self._address = address
        self._inbox = inbox
        self._listeners = listeners
        self._streams: set[_Stream] = set()
        self._farewells: set[asyncio.Future[None]] = set()

    async def Draft(  # type: ignore[override] # writes to the context itself, which grpc takes too
        self, request_iterator: AsyncIterator[pb.DraftRequest], context: Context
    ) -> None:
        """See draft.proto."""
        stream = _Stream(context)
        hello = await anext(request_iterator, None)
        if hello is None or hello.WhichOneof("content") != "hello":
            raise InvalidRequestError("the first message must be hello", field="hello")
        session = self._worker.attach(hello_from_proto(hello.hello), stream)
        self._streams.add(stream)
        try:
            await self._serve(_Requests(self._worker, session, stream), request_iterator, stream)
        finally:
            self._streams.discard(stream)
            self._worker.detach(session, stream)

    def begin_goodbye(self) -> None:
        """Ask every decode worker to close its stream: nothing else would end it."""
        for stream in self._streams:
            self._farewells.add(asyncio.ensure_future(stream.say_goodbye("draining")))

    async def _serve(
        self, requests: _Requests, iterator: AsyncIterator[pb.DraftRequest], stream: _Stream
    ) -> None:
        """Until the worker ends the stream, or one of its two ways ends by an error."""
        own = replace(self._worker.terms, address=self._address())
        terms = pb.DraftResponse(terms=terms_to_proto(own))
        with ExitStack() as stack:
            by_socket = _SocketWay(requests, self._inbox)
            stack.callback(by_socket.close)
            for listener in self._listeners:
                if (offer := listener.offer(by_socket.begin)) is not None:
                    stack.callback(listener.withdraw, offer.token)
                    offer.write(terms.terms)
            await stream.write(terms)
            by_grpc = asyncio.ensure_future(self._follow(requests, iterator, stream))
            try:
                await asyncio.wait({by_grpc, by_socket.ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                by_grpc.cancel()
                await asyncio.wait({by_grpc})
            if by_grpc.cancelled():
                by_socket.ended.result()
            by_grpc.result()

    async def _follow(
        self, requests: _Requests, iterator: AsyncIterator[pb.DraftRequest], stream: _Stream
    ) -> None:
        loop = asyncio.get_running_loop()
        async for request in iterator:
            if request.WhichOneof("content") == "open":
                requests.open(request.open)
                continue
            answered: asyncio.Future[AnsweredStep] = loop.create_future()
            requests.begin_step(
                request, self._carrier, time.monotonic(), partial(_settle_soon, answered)
            )
            await stream.write(_response(await answered))


class _Requests:
    """What a decode worker asks for on one stream, whatever way it came. Raises what the stream
    ends with."""

    def __init__(self, worker: DraftWorker, session: Session, stream: _Stream) -> None:
        self.worker = worker
        self._session = session
        self._stream = stream

    def open(self, message: pb.DraftOpen) -> None:
        """A prefill worker will push rows. Event loop only."""
        check_key(message.key)
        self.worker.open(
            self._session, self._stream, message.key, message.transfer_id, message.end_position
        )

    def begin_step(
        self,
        request: pb.DraftRequest,
        carrier: RowCarrier,
        arrived_at: float,
        on_outcome: OnOutcome,
    ) -> None:
        """See DraftWorker.begin_step. From any thread."""
        if (content := request.WhichOneof("content")) != "step":
            raise InvalidRequestError(f"{content} is accepted as first message only")
        message, own_key = request.step, self._session.own_key
        received = tasks_from_proto(message, self.worker.terms, carrier, own_key)
        step = Step(
            epoch=message.epoch,
            step_id=message.step_id,
            tasks=received.tasks,
            dropped=[own_key(key) for key in message.dropped_keys],
            refused=received.refused,
            arrived_at=arrived_at,
        )
        self.worker.begin_step(self._session, self._stream, step, on_outcome)


class _SocketWay:
    """The worker's socket, once it has connected. ended: fails with why it has ended.

    `_take` runs in the compute thread, everything else in the event loop.
    """

    def __init__(self, requests: _Requests, inbox: ComputeInbox) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._requests = requests
        self._inbox = inbox
        self._connection: SocketConnection | None = None

    def begin(self, peer: SocketPeer) -> None:
        """It has connected."""
        if self._connection is not None:  # a stream's messages have one order
            peer.connection.close()
            return
        terms, memory = self._requests.worker.terms, peer.memory
        row_format = terms.row_format
        carrier = FollowingRows(row_format) if memory is None else SharedRows(row_format, memory)
        self._connection = SocketConnection(
            peer.connection,
            self._inbox,
            max_rows_bytes=memory_bytes(row_format, terms.max_rows_per_message),
            take=partial(self._take, carrier),
            encode=lambda answered: _response(answered).SerializeToString(),
            on_failure=lambda error: self._loop.call_soon_threadsafe(self._fail, error),
        )
        self._connection.begin()

    def close(self) -> None:
        """The stream ends."""
        if self._connection is not None:
            self._connection.end()
        if not self.ended.cancel() and not self.ended.cancelled():
            self.ended.exception()  # gRPC may have told first why the stream ends

    def _take(self, carrier: FollowingRows | SharedRows, frame: Frame, on_over: OnOver) -> None:
        request = _request(frame.message)
        if isinstance(carrier, FollowingRows):
            carrier.followed = frame.rows
        if request.WhichOneof("content") == "open":
            self._loop.call_soon_threadsafe(self._open, request.open, on_over)
        else:
            self._requests.begin_step(request, carrier, self._inbox.arrived_at, on_over)

    def _open(self, message: pb.DraftOpen, on_over: OnOver) -> None:
        try:
            self._requests.open(message)
        except KVBraidError as error:
            on_over(error)
        else:
            on_over(None)

    def _fail(self, error: KVBraidError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


def _settle_soon(answered: asyncio.Future[AnsweredStep], outcome: Outcome) -> None:
    answered.get_loop().call_soon_threadsafe(_settle, answered, outcome)


def _settle(answered: asyncio.Future[AnsweredStep], outcome: Outcome) -> None:
    if answered.done():  # whoever asked has gone
        return
    if isinstance(outcome, KVBraidError):
        answered.set_exception(outcome)
    else:
        answered.set_result(outcome)


def _request(message: bytes) -> pb.DraftRequest:
    try:
        return pb.DraftRequest.FromString(message)
    except DecodeError as error:
        raise InvalidRequestError(f"not a request: {error}", field="content") from error


def _response(answered: AnsweredStep) -> pb.DraftResponse:
    response = pb.DraftResponse()
    fill_answers(response.answers, answered)
    return response


class _Stream:
    """The writing side of one Draft call."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._writing = asyncio.Lock()

    async def write(self, response: pb.DraftResponse) -> None:
        """One message at a time, whoever writes."""
        async with self._writing:
            await self._context.write(response)

    async def say_goodbye(self, reason: str) -> None:
        """Ask the worker to close the stream."""
        await self.write(pb.DraftResponse(goodbye=pb.DraftGoodbye(reason=reason)))
