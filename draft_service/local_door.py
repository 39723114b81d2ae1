"""The Unix-domain socket for decode workers of this host."""

from __future__ import annotations

import os
import secrets
import socket

from kvbraid.errors import IncompatibleError
from kvbraid.transport.draft_terms import DraftTerms, LocalSocketOffer
from kvbraid.transport.local_socket import (
    SOCKET_PREFIX,
    abstract_address,
    check_same_user,
    socket_reach,
)
from kvbraid.transport.shared_rows import RowMemory, memory_bytes
from kvbraid.transport.socket_frames import TOKEN_BYTES


class LocalDoor:
    """See Door: Linux's abstract namespace, for processes of this user, which share memory for
    rows. terms: of the service."""

    def __init__(self, terms: DraftTerms) -> None:
        self.name = f"{SOCKET_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self._reach = socket_reach()
        self._memory_bytes = memory_bytes(terms.row_format, terms.max_rows_per_message)

    def listen(self) -> socket.socket | None:
        """See Door."""
        if not self._reach:
            return None
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(abstract_address(self.name))
        listening.listen()
        return listening

    def admit(self, connection: socket.socket) -> LocalStranger:
        """See Door."""
        check_same_user(connection)
        return LocalStranger(connection, self._memory_bytes)

    def offer(self, token: bytes) -> LocalSocketOffer:
        """See Door."""
        return LocalSocketOffer(self._reach, self.name, token)


class LocalStranger:
    """See Stranger. Token and memory come in one message."""

    def __init__(self, connection: socket.socket, memory_bytes: int) -> None:
        self.connection = connection
        self._memory_bytes = memory_bytes
        self._fds: list[int] = []

    def shown(self) -> bytes | None:
        """See Stranger."""
        token, self._fds, _, _ = socket.recv_fds(self.connection, TOKEN_BYTES, 1)
        return token

    def take_memory(self) -> RowMemory:
        """See Stranger."""
        if not self._fds:
            raise IncompatibleError("no memory for rows came with the token")
        return RowMemory(self._fds.pop(), self._memory_bytes)

    def close(self) -> None:
        """See Stranger."""
        self.connection.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
