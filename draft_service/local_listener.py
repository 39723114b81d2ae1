"""Who may connect to the Unix-domain socket for decode workers of this host."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from typing import NamedTuple

from kvbraid.errors import IncompatibleError
from kvbraid.transport.draft_terms import DraftTerms, LocalSocketOffer
from kvbraid.transport.local_socket import (
    ACCEPTED,
    SOCKET_PREFIX,
    TOKEN_BYTES,
    abstract_address,
    check_same_user,
    socket_reach,
)
from kvbraid.transport.shared_rows import RowMemory, memory_bytes

# Connections that have not shown a token yet: how many, and for how long.
_MAX_STRANGERS = 64
_TOKEN_S = 5.0


class LocalPeer(NamedTuple):
    """A worker that has shown the token of its stream."""

    connection: socket.socket
    memory: RowMemory


class LocalListener:
    """Listens in Linux's abstract namespace, for processes of this user that show a token. Used in
    the event loop; terms: of the service."""

    def __init__(self, terms: DraftTerms) -> None:
        self._reach = socket_reach()
        self._memory_bytes = memory_bytes(terms.row_format, terms.max_rows_per_message)
        self._offered: dict[bytes, Callable[[LocalPeer], None]] = {}
        self._strangers: dict[socket.socket, asyncio.TimerHandle] = {}
        self._name = f"{SOCKET_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Listen, where there is such a socket."""
        if not self._reach:
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(abstract_address(self._name))
        self._socket.listen()
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._accept, self._socket)

    def close(self) -> None:
        """Accept nobody any more. Workers that are connected stay."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        for stranger in list(self._strangers):
            self._forget(stranger)
            stranger.close()

    def offer(self, on_peer: Callable[[LocalPeer], None]) -> LocalSocketOffer | None:
        """What a stream is offered, good for one connection, which is handed to `on_peer`; None
        while nothing listens."""
        if self._socket is None:
            return None
        token = secrets.token_bytes(TOKEN_BYTES)
        self._offered[token] = on_peer
        return LocalSocketOffer(self._reach, self._name, token)

    def withdraw(self, offer: LocalSocketOffer) -> None:
        """Its stream has ended."""
        self._offered.pop(offer.token, None)

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except OSError:  # it has gone already
            return
        try:
            check_same_user(connection)
        except IncompatibleError:
            connection.close()
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            connection.close()
            return
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        self._strangers[connection] = loop.call_later(_TOKEN_S, self._give_up, connection)
        loop.add_reader(connection, self._meet, connection)

    def _give_up(self, stranger: socket.socket) -> None:
        self._forget(stranger)
        stranger.close()

    def _forget(self, stranger: socket.socket) -> None:
        self._strangers.pop(stranger).cancel()
        asyncio.get_running_loop().remove_reader(stranger)

    def _meet(self, stranger: socket.socket) -> None:
        self._forget(stranger)
        fds: list[int] = []
        try:
            token, fds, _, _ = socket.recv_fds(stranger, TOKEN_BYTES, 1)
            on_peer = self._offered.pop(token, None)
            if on_peer is None or not fds:
                raise IncompatibleError("no token of a stream, or no memory with it")
            memory = RowMemory(fds.pop(), self._memory_bytes)
            stranger.send(ACCEPTED)
        except (OSError, IncompatibleError):
            # Whoever connects sees the end of the connection; nobody else has to know.
            stranger.close()
            for fd in fds:
                os.close(fd)
            return
        on_peer(LocalPeer(stranger, memory))
