"""DraftService: decode the messages, run the steps, encode what came of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from draft_service.local_connection import LocalConnection
from draft_service.local_listener import LocalListener, LocalPeer
from draft_service.sessions import Session
from draft_service.worker import DraftWorker, SendAnswer, Step
from kvbraid.errors import InvalidRequestError, KVBraidError, LeaseLostError
from kvbraid.transport.draft_answers import AnsweredStep, fill_answers
from kvbraid.transport.draft_rows import RowCarrier
from kvbraid.transport.draft_step import check_key, tasks_from_proto
from kvbraid.transport.draft_terms import hello_from_proto, offer_to_proto, terms_to_proto
from kvbraid.transport.shared_rows import SharedRows
from kvbraid.v1 import draft_pb2 as pb
from kvbraid.worker.ingest_servicer import IngestServicer

Context = grpc.aio.ServicerContext[Any, Any]


class DraftServicer(IngestServicer):
    """The gRPC edge of a draft service. lease_s: longest silence of a prefill worker. address:
    where prefill workers reach this very service, known once it listens. listener: what workers of
    this host may use instead; its owner starts and closes it."""

    def __init__(
        self,
        worker: DraftWorker,
        *,
        lease_s: float,
        address: Callable[[], str],
        listener: LocalListener | None = None,
    ) -> None:
        super().__init__(worker.intake, lease_s=lease_s)
        self._worker = worker
        self._address = address
        self._listener = listener
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
            local = _LocalWay(requests)
            stack.callback(local.close)
            if self._listener and (offer := self._listener.offer(local.begin)):
                stack.callback(self._listener.withdraw, offer)
                terms.terms.local.CopyFrom(offer_to_proto(offer))
            await stream.write(terms)
            by_grpc = asyncio.ensure_future(self._follow(requests, iterator, stream))
            try:
                await asyncio.wait({by_grpc, local.ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                by_grpc.cancel()
                await asyncio.wait({by_grpc})
            if by_grpc.cancelled():
                local.ended.result()
            by_grpc.result()

    async def _follow(
        self, requests: _Requests, iterator: AsyncIterator[pb.DraftRequest], stream: _Stream
    ) -> None:
        async for request in iterator:
            answer = requests.take(request, self._carrier, None)
            if answer is not None:
                await stream.write(_response(await answer))


class _Requests:
    """What a decode worker asks for on one stream, whatever way it came."""

    def __init__(self, worker: DraftWorker, session: Session, stream: _Stream) -> None:
        self.worker = worker
        self._session = session
        self._stream = stream

    def take(
        self, request: pb.DraftRequest, carrier: RowCarrier, send: SendAnswer | None
    ) -> asyncio.Future[AnsweredStep] | None:
        """The answer to a step; None for a request without. send: see DraftWorker.begin_step.

        Raises what the stream ends with.
        """
        session = self._session
        if session.owner is not self._stream:
            raise LeaseLostError("another stream speaks for this worker now")
        match request.WhichOneof("content"):
            case "step":
                return self.worker.begin_step(session, self._step(request.step, carrier), send)
            case "open":
                opened = request.open
                check_key(opened.key)
                self.worker.open(session, opened.key, opened.transfer_id, opened.end_position)
                return None
            case other:
                raise InvalidRequestError(f"{other} is accepted as first message only")

    def _step(self, message: pb.DraftStep, carrier: RowCarrier) -> Step:
        own_key = self._session.own_key
        received = tasks_from_proto(message, self.worker.terms, carrier, own_key)
        return Step(
            epoch=message.epoch,
            step_id=message.step_id,
            tasks=received.tasks,
            dropped=[own_key(key) for key in message.dropped_keys],
            refused=received.refused,
        )


class _LocalWay:
    """The worker's local socket, once it has connected. ended: fails with why it has ended."""

    def __init__(self, requests: _Requests) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests = requests
        self._connection: LocalConnection | None = None

    def begin(self, peer: LocalPeer) -> None:
        """It has connected."""
        carrier = SharedRows(self._requests.worker.terms.row_format, peer.memory)

        def take(message: bytes, send: SendAnswer) -> asyncio.Future[AnsweredStep] | None:
            return self._requests.take(_request(message), carrier, send)

        self._connection = LocalConnection(
            peer.connection,
            max_rows_bytes=peer.memory.num_bytes,
            take=take,
            encode=lambda answered: _response(answered).SerializeToString(),
        )
        self._connection.failure.add_done_callback(self._fail)

    def close(self) -> None:
        """The stream ends."""
        if self._connection is not None:
            self._connection.close()
        if not self.ended.cancel() and not self.ended.cancelled():
            self.ended.exception()  # gRPC may have told first why the stream ends

    def _fail(self, failure: asyncio.Future[KVBraidError]) -> None:
        if not self.ended.done():
            self.ended.set_exception(failure.result())


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
