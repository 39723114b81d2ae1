"""Who may connect to a socket for decode workers: whoever shows the token of a stream."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvbraid.errors import IncompatibleError
from kvbraid.transport.draft_terms import LocalSocketOffer, TcpOffer
from kvbraid.transport.shared_rows import RowMemory
from kvbraid.transport.socket_frames import ACCEPTED, TOKEN_BYTES
from kvbraid.transport.step_socket import StepSocket

# Connections that have not shown a token yet: how many, and for how long.
_MAX_STRANGERS = 64
_TOKEN_S = 5.0

Offer = LocalSocketOffer | TcpOffer


class SocketPeer(NamedTuple):
    """A worker that has shown the token of its stream. memory: for rows, where it shares some."""

    connection: StepSocket
    memory: RowMemory | None


OnPeer = Callable[[SocketPeer], None]


class Stranger(Protocol):
    """One connection before it is let in."""

    @property
    def connection(self) -> StepSocket:
        """Itself."""
        ...

    def shown(self) -> bytes | None:
        """The token; None while more of it is to come. Raises OSError or IncompatibleError for
        who has to go."""
        ...

    def take_memory(self) -> RowMemory | None:
        """What came with the token. Raises IncompatibleError for what cannot be used."""
        ...

    def close(self) -> None:
        """Send it away."""
        ...


class Door(Protocol):
    """One kind of socket."""

    def listen(self) -> socket.socket | None:
        """Listening; None where there is no such socket. Raises StartupError when it cannot."""
        ...

    def admit(self, connection: socket.socket) -> Stranger:
        """A new connection. Raises OSError or IncompatibleError for who has no business here."""
        ...

    def offer(self, token: bytes) -> Offer:
        """What a stream is told."""
        ...


class SocketListener:
    """Lets workers in through `door`. Used in the event loop."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._offered: dict[bytes, OnPeer] = {}
        self._strangers: dict[Stranger, asyncio.TimerHandle] = {}
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Listen, where there is such a socket. Raises StartupError when it cannot."""
        self._socket = self._door.listen()
        if self._socket is not None:
            self._socket.setblocking(False)
            asyncio.get_running_loop().add_reader(self._socket, self._accept, self._socket)

    def close(self) -> None:
        """Accept nobody any more. Workers that are connected stay."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        for stranger in list(self._strangers):
            self._send_away(stranger)

    def offer(self, on_peer: OnPeer) -> Offer | None:
        """What a stream is offered, good for one connection, which is handed to `on_peer`; None
        while nothing listens."""
        if self._socket is None:
            return None
        token = secrets.token_bytes(TOKEN_BYTES)
        self._offered[token] = on_peer
        return self._door.offer(token)

    def withdraw(self, token: bytes) -> None:
        """Its stream has ended, or has come another way."""
        self._offered.pop(token, None)

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except OSError:  # it has gone already
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            connection.close()
            return
        try:
            connection.setblocking(False)
            stranger = self._door.admit(connection)
        except (OSError, IncompatibleError):
            connection.close()
            return
        loop = asyncio.get_running_loop()
        self._strangers[stranger] = loop.call_later(_TOKEN_S, self._send_away, stranger)
        loop.add_reader(stranger.connection.fileno(), self._meet, stranger)

    def _send_away(self, stranger: Stranger) -> None:
        self._forget(stranger)
        stranger.close()

    def _forget(self, stranger: Stranger) -> None:
        self._strangers.pop(stranger).cancel()
        asyncio.get_running_loop().remove_reader(stranger.connection.fileno())

    def _meet(self, stranger: Stranger) -> None:
        try:
            token = stranger.shown()
            if token is None:
                return
            on_peer = self._offered.pop(token, None)
            if on_peer is None:
                raise IncompatibleError("no token of a stream")
            peer = SocketPeer(stranger.connection, stranger.take_memory())
            stranger.connection.sendmsg([memoryview(ACCEPTED)])
        except (OSError, IncompatibleError):
            # Whoever connects sees the end of the connection; nobody else has to know.
            self._send_away(stranger)
            return
        self._forget(stranger)
        on_peer(peer)
