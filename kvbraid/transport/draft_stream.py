"""A decode worker's stream to a draft service: opened with a handshake, then steps and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import grpc

from kvbraid.errors import DataLossError, DeadlineError, IncompatibleError, UnavailableError
from kvbraid.rpc.client_errors import translated_rpc_errors
from kvbraid.speculative.proposal import DraftTask
from kvbraid.transport.draft_answers import AnsweredStep, answers_from_proto
from kvbraid.transport.draft_rows import row_carrier
from kvbraid.transport.draft_step import fill_step
from kvbraid.transport.draft_terms import (
    DraftPeer,
    DraftTerms,
    hello_to_proto,
    misfits,
    terms_from_proto,
)
from kvbraid.v1 import draft_pb2 as pb
from kvbraid.v1.draft_pb2_grpc import DraftServiceStub

if TYPE_CHECKING:
    DraftCall = grpc.aio.StreamStreamCall[pb.DraftRequest, pb.DraftResponse]


class OutgoingMessage:
    """A message for `DraftStream.send`; may be made in any thread.

    on_answer: called in the I/O loop, once, with the answer of a step, or with None when the
    stream ends first. None for messages without an answer.
    """

    def __init__(
        self,
        request: pb.DraftRequest,
        num_tasks: int = 0,
        on_answer: Callable[[AnsweredStep | None], None] | None = None,
    ) -> None:
        self.request = request
        self.num_tasks = num_tasks
        self.on_answer = on_answer


class DraftStream:
    """An open stream. Use it from the loop that opened it, except where it says otherwise.

    terms: what the service has.
    """

    def __init__(self, call: DraftCall, address: str, terms: DraftTerms) -> None:
        self.terms = terms
        self.address = address
        self._call = call
        self._carrier = row_carrier(terms.row_format)
        self._last_step_id = 0
        self._unanswered: dict[int, OutgoingMessage] = {}

    def step_message(
        self,
        tasks: Sequence[DraftTask],
        dropped: Sequence[str],
        on_answer: Callable[[AnsweredStep | None], None],
    ) -> OutgoingMessage:
        """A step of `tasks`, which are within `terms`. From any thread."""
        request = pb.DraftRequest()
        fill_step(request.step, tasks, dropped, epoch=self.terms.epoch, carrier=self._carrier)
        return OutgoingMessage(request, len(tasks), on_answer)

    def open_message(self, key: str, transfer_id: bytes, end_position: int) -> OutgoingMessage:
        """Announces a prefill worker's rows. From any thread."""
        opened = pb.DraftOpen(key=key, transfer_id=transfer_id, end_position=end_position)
        return OutgoingMessage(pb.DraftRequest(open=opened))

    async def send(self, message: OutgoingMessage) -> None:
        """Write one message; never called again before it has returned.

        A step gets its id here, so that ids grow in the order of sending. Raises a KVBraidError
        when the stream has ended.
        """
        if message.on_answer is not None:
            self._last_step_id += 1
            message.request.step.step_id = self._last_step_id
            self._unanswered[self._last_step_id] = message
        with translated_rpc_errors(self.address):
            await _write(self._call, message.request, self.address)

    async def receive(self) -> bool:
        """Take one message of the service; False when it says goodbye.

        Raises a KVBraidError when the stream ends or the service breaks the protocol.
        """
        with translated_rpc_errors(self.address):
            response = await self._call.read()
        if not isinstance(response, pb.DraftResponse):
            raise UnavailableError(f"{self.address}: the draft service ended the stream")
        match response.WhichOneof("content"):
            case "answers":
                self._take_answers(response.answers)
                return True
            case "goodbye":
                return False
            case other:
                raise DataLossError(f"{self.address} sent {other} in the middle of the stream")

    def _take_answers(self, answers: pb.DraftAnswers) -> None:
        message = self._unanswered.pop(answers.step_id, None)
        if message is None or message.on_answer is None:
            raise DataLossError(f"{self.address} answered step {answers.step_id}, which is not due")
        try:
            answered = answers_from_proto(answers, message.num_tasks)
        except DataLossError:
            message.on_answer(None)
            raise
        message.on_answer(answered)

    def close(self) -> None:
        """End the stream; every step without an answer is told. Harmless when repeated."""
        self._call.cancel()
        unanswered, self._unanswered = self._unanswered, {}
        for message in unanswered.values():
            if message.on_answer is not None:
                message.on_answer(None)


async def open_draft_stream(
    channel: grpc.aio.Channel, address: str, peer: DraftPeer, *, timeout_s: float
) -> DraftStream:
    """Open a stream for `peer` and agree on terms.

    Raises IncompatibleError with every reason when the service cannot draft for `peer`,
    DeadlineError when it does not answer in time, and what else a call fails with.
    """
    call: DraftCall = DraftServiceStub(channel).Draft()
    stream = None
    try:
        async with asyncio.timeout(timeout_s):
            with translated_rpc_errors(address):
                hello = pb.DraftRequest(hello=hello_to_proto(peer))
                await _write(call, hello, address)
                response = await call.read()
        stream = DraftStream(call, address, _terms(response, peer, address))
        return stream
    except TimeoutError:
        raise DeadlineError(f"{address}: no terms within {timeout_s} s") from None
    finally:
        if stream is None:
            call.cancel()


def _terms(response: object, peer: DraftPeer, address: str) -> DraftTerms:
    if not isinstance(response, pb.DraftResponse) or response.WhichOneof("content") != "terms":
        raise UnavailableError(f"{address}: the draft service answered no terms")
    terms = terms_from_proto(response.terms)
    if reasons := misfits(peer, terms):
        raise IncompatibleError(f"{address}: {'; '.join(reasons)}")
    return terms


async def _write(call: DraftCall, request: pb.DraftRequest, address: str) -> None:
    try:
        await call.write(request)
    except asyncio.InvalidStateError:
        # The call is over; reading from it says why.
        await call.read()
        raise UnavailableError(f"{address}: the draft service ended the stream") from None
