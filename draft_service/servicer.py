"""DraftService: decode the messages, run the steps, encode what came of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from draft_service.sessions import Session
from draft_service.worker import DraftWorker, Step
from kvbraid.errors import InvalidRequestError, LeaseLostError
from kvbraid.transport.draft_answers import fill_answers
from kvbraid.transport.draft_step import (
    check_key,
    tasks_from_proto,
)
from kvbraid.transport.draft_terms import hello_from_proto, terms_to_proto
from kvbraid.v1 import draft_pb2 as pb
from kvbraid.worker.ingest_servicer import IngestServicer

Context = grpc.aio.ServicerContext[Any, Any]


class DraftServicer(IngestServicer):
    """The gRPC edge of a draft service. lease_s: longest silence of a prefill worker."""

    def __init__(self, worker: DraftWorker, *, lease_s: float) -> None:
        super().__init__(worker.intake, lease_s=lease_s)
        self._worker = worker
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
            await stream.write(pb.DraftResponse(terms=terms_to_proto(self._worker.terms)))
            async for request in request_iterator:
                if session.owner is not stream:
                    raise LeaseLostError("another stream speaks for this worker now")
                await self._take(session, request, stream)
        finally:
            self._streams.discard(stream)
            self._worker.detach(session, stream)

    def begin_goodbye(self) -> None:
        """Ask every decode worker to close its stream: nothing else would end it."""
        for stream in self._streams:
            self._farewells.add(asyncio.ensure_future(stream.say_goodbye("draining")))

    async def _take(self, session: Session, request: pb.DraftRequest, stream: _Stream) -> None:
        match request.WhichOneof("content"):
            case "step":
                answered = await self._worker.step(session, self._step(session, request.step))
                response = pb.DraftResponse()
                fill_answers(response.answers, answered)
                await stream.write(response)
            case "open":
                opened = request.open
                check_key(opened.key)
                self._worker.open(session, opened.key, opened.transfer_id, opened.end_position)
            case other:
                raise InvalidRequestError(f"{other} is accepted as first message only")

    def _step(self, session: Session, message: pb.DraftStep) -> Step:
        received = tasks_from_proto(message, self._worker.terms, self._carrier, session.own_key)
        return Step(
            epoch=message.epoch,
            step_id=message.step_id,
            tasks=received.tasks,
            dropped=[session.own_key(key) for key in message.dropped_keys],
            refused=received.refused,
        )


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
