"""Opens a decode worker's stream to a draft service and chooses how it is carried."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Literal

import grpc

from kvbraid.errors import DeadlineError, IncompatibleError, KVBraidError, UnavailableError
from kvbraid.rpc.client_errors import translated_rpc_errors
from kvbraid.settings.tls import TlsSettings
from kvbraid.transport.draft_socket import (
    DraftSocket,
    SocketWire,
    connect_local_socket,
    connect_tcp,
)
from kvbraid.transport.draft_stream import DraftStream
from kvbraid.transport.draft_terms import (
    DraftPeer,
    SocketOffers,
    hello_to_proto,
    misfits,
    offers_from_proto,
    terms_from_proto,
)
from kvbraid.transport.grpc_draft_stream import GrpcDraftStream, write_request
from kvbraid.transport.local_socket import socket_reach
from kvbraid.transport.socket_draft_stream import SocketDraftStream
from kvbraid.v1 import draft_pb2 as pb
from kvbraid.v1.draft_pb2_grpc import DraftServiceStub

logger = logging.getLogger(__name__)

DraftWireChoice = Literal["auto", "local_socket", "tcp", "grpc"]

# A firewall may swallow what is sent to a port: the other ways must still have their time.
_CONNECT_S = 2.0


def choose_draft_wires(
    choice: DraftWireChoice, offers: SocketOffers, own_reach: str
) -> list[SocketWire]:
    """The sockets to try, in order; when none can be had, what is not asked for goes by gRPC.

    auto: the local socket where it reaches, then TCP where it is offered. own_reach:
    `local_socket.socket_reach` of this process.
    """
    if choice != "auto":
        return [] if choice == "grpc" else [choice]
    wires: list[SocketWire] = []
    if offers.local is not None and offers.local.host_id == own_reach != "":
        wires.append("local_socket")
    if offers.tcp is not None:
        wires.append("tcp")
    return wires


async def open_draft_stream(
    channel: grpc.aio.Channel,
    address: str,
    peer: DraftPeer,
    choice: DraftWireChoice,
    *,
    tls: TlsSettings,
    timeout_s: float,
) -> DraftStream:
    """Open a stream for `peer`, agree on terms and choose the wire. tls: of the channel.

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
            stream = await _carried(control, offers_from_proto(message), choice, tls)
        return stream
    except TimeoutError:
        raise DeadlineError(f"{address}: no terms within {timeout_s} s") from None
    finally:
        if stream is None:
            call.cancel()


async def _carried(
    control: GrpcDraftStream, offers: SocketOffers, choice: DraftWireChoice, tls: TlsSettings
) -> DraftStream:
    for wire in choose_draft_wires(choice, offers, socket_reach()):
        try:
            return SocketDraftStream(control, await _connected(control, offers, wire, tls))
        except KVBraidError as error:
            if choice != "auto":
                raise
            logger.warning("drafts travel another way: %s", error)
    return control


async def _connected(
    control: GrpcDraftStream, offers: SocketOffers, wire: SocketWire, tls: TlsSettings
) -> DraftSocket:
    connect: Callable[[], DraftSocket]
    if wire == "local_socket" and offers.local is not None:
        terms = control.terms
        connect = partial(connect_local_socket, offers.local, terms, timeout_s=_CONNECT_S)
    elif wire == "tcp" and offers.tcp is not None:
        connect = partial(connect_tcp, offers.tcp, tls, timeout_s=_CONNECT_S)
    else:
        raise UnavailableError(f"{control.address} offers no {wire}")
    connecting = asyncio.get_running_loop().run_in_executor(None, connect)
    try:
        async with asyncio.timeout(_CONNECT_S):
            return await asyncio.shield(connecting)
    except TimeoutError:
        connecting.add_done_callback(_discard)  # the thread cannot be stopped
        raise UnavailableError(f"{control.address}: no {wire} within {_CONNECT_S} s") from None
    except asyncio.CancelledError:
        connecting.add_done_callback(_discard)
        raise


def _discard(connecting: asyncio.Future[DraftSocket]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().connection.close()


def _terms(response: object, address: str) -> pb.DraftTerms:
    if not isinstance(response, pb.DraftResponse) or response.WhichOneof("content") != "terms":
        raise UnavailableError(f"{address}: the draft service answered no terms")
    return response.terms
