"""The sockets that drafting steps travel on, TLS ones too."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Sequence
from typing import Protocol

# Of TLS.
MAX_RECORD_BYTES = 16 << 10


class StepSocket(Protocol):
    """What steps need of a connected, non-blocking socket; `socket.socket` has it."""

    def fileno(self) -> int:
        """Its descriptor; negative once closed."""
        ...

    def recv_into(self, room: memoryview, /) -> int:
        """How many bytes were read, none at the end. Raises BlockingIOError when there are none
        yet, OSError when there will be none."""
        ...

    def sendmsg(self, pieces: Sequence[memoryview], /) -> int:
        """How many bytes of `pieces`, one after the other, were taken. Raises BlockingIOError when
        there is no room, after which the same bytes must be sent first, and OSError when there
        will be none."""
        ...

    def shutdown(self, how: int, /) -> None:
        """See socket.shutdown. From any thread."""
        ...

    def close(self) -> None:
        """See socket.close."""
        ...


class TlsSocket:
    """StepSocket on a TLS connection whose handshake is done, or is up to `shake_hands`."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        connection.setblocking(False)
        self._connection = connection
        # OpenSSL's connections are for one thread at a time, unlike the kernel's.
        self._using = threading.Lock()

    def shake_hands(self) -> bool:
        """Whether the handshake is done; if not, again once there is something to read: what this
        side writes always has room in a new socket. Raises OSError when it fails."""
        try:
            self._connection.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def fileno(self) -> int:
        """See StepSocket."""
        return self._connection.fileno()

    def recv_into(self, room: memoryview) -> int:
        """See StepSocket. room: for MAX_RECORD_BYTES at least, or what is left of a record would
        wait where no poll sees it."""
        with self._using:
            try:
                return self._connection.recv_into(room)
            except ssl.SSLWantReadError:
                raise BlockingIOError from None

    def sendmsg(self, pieces: Sequence[memoryview]) -> int:
        """See StepSocket. Of the first piece alone: the others would be other records anyway."""
        with self._using:
            try:
                return self._connection.send(pieces[0])
            except ssl.SSLWantWriteError:
                raise BlockingIOError from None

    def shutdown(self, how: int) -> None:
        """See StepSocket. Of the socket below: SSLSocket's own would let what is sent afterwards
        out in plaintext."""
        socket.socket.shutdown(self._connection, how)

    def close(self) -> None:
        """See StepSocket."""
        with self._using:
            self._connection.close()
