"""Opens a decode worker's stream to a draft service and chooses how it is carried."""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from typing import Literal

import grpc

from kvbraid.errors import DeadlineError, IncompatibleError, KVBraidError, UnavailableError
from kvbraid.rpc.client_errors import translated_rpc_errors
from kvbraid.transport.draft_stream import DraftStream
from kvbraid.transport.draft_terms import (
    DraftPeer,
    LocalSocketOffer,
    hello_to_proto,
    misfits,
    offer_from_proto,
    terms_from_proto,
)
from kvbraid.transport.grpc_draft_stream import GrpcDraftStream, write_request
from kvbraid.transport.local_draft_stream import LocalDraftStream, connect_local_socket
from kvbraid.transport.local_socket import socket_reach
from kvbraid.transport.shared_rows import RowMemory
from kvbraid.v1 import draft_pb2 as pb
from kvbraid.v1.draft_pb2_grpc import DraftServiceStub

logger = logging.getLogger(__name__)

DraftWireChoice = Literal["auto", "local_socket", "grpc"]


def choose_draft_wire(
    choice: DraftWireChoice, offer: LocalSocketOffer | None, own_reach: str
) -> Literal["local_socket", "grpc"]:
    """How a stream is carried: the local socket where it reaches, gRPC otherwise.

    own_reach: `local_socket.socket_reach` of this process.
    """
    if choice != "auto":
        return choice
    reaches = offer is not None and offer.host_id == own_reach != ""
    return "local_socket" if reaches else "grpc"


async def open_draft_stream(
    channel: grpc.aio.Channel,
    address: str,
    peer: DraftPeer,
    choice: DraftWireChoice,
    *,
    timeout_s: float,
) -> DraftStream:
    """Open a stream for `peer`, agree on terms and choose the wire.

    Raises IncompatibleError with every reason when the service cannot draft for `peer`,
    DeadlineError when it does not answer in time, and what else a call fails with.
    """
    call = DraftServiceStub(channel).Draft()
    stream: DraftStream | None = None
    try:
        async with asyncio.timeout(timeout_s):
            with translated_rpc_errors(address):
                hello = pb.DraftRequest(hello=hello_to_proto(peer))
                await write_request(call, hello, address)
                response = await call.read()
            message = _terms(response, address)
            terms = terms_from_proto(message)
            if reasons := misfits(peer, terms):
                raise IncompatibleError(f"{address}: {'; '.join(reasons)}")
            control = GrpcDraftStream(call, address, terms)
            stream = await _carried(control, offer_from_proto(message), choice, timeout_s)
        return stream
    except TimeoutError:
        raise DeadlineError(f"{address}: no terms within {timeout_s} s") from None
    finally:
        if stream is None:
            call.cancel()


async def _carried(
    control: GrpcDraftStream,
    offer: LocalSocketOffer | None,
    choice: DraftWireChoice,
    timeout_s: float,
) -> DraftStream:
    if choose_draft_wire(choice, offer, socket_reach()) == "grpc":
        return control
    try:
        connection, memory = await _connected(control, offer, timeout_s)
    except KVBraidError as error:
        if choice == "local_socket":
            raise
        logger.warning("drafts travel by gRPC, the local socket failed: %s", error)
        return control
    return LocalDraftStream(control, connection, memory)


async def _connected(
    control: GrpcDraftStream, offer: LocalSocketOffer | None, timeout_s: float
) -> tuple[socket.socket, RowMemory]:
    if offer is None:
        raise UnavailableError(f"{control.address} offers no local socket")
    connect = partial(connect_local_socket, offer, control.terms, timeout_s=timeout_s)
    connecting = asyncio.get_running_loop().run_in_executor(None, connect)
    try:
        return await asyncio.shield(connecting)
    except asyncio.CancelledError:
        connecting.add_done_callback(_discard)  # the thread cannot be stopped
        raise


def _discard(connecting: asyncio.Future[tuple[socket.socket, RowMemory]]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result()[0].close()


def _terms(response: object, address: str) -> pb.DraftTerms:
    if not isinstance(response, pb.DraftResponse) or response.WhichOneof("content") != "terms":
        raise UnavailableError(f"{address}: the draft service answered no terms")
    return response.terms
