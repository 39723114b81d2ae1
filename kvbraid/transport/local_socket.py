"""Unix-domain stream sockets between two processes of one user and host, and frames on them."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from kvbraid.errors import DataLossError, IncompatibleError
from kvbraid.transport.staging import host_id

SOCKET_PREFIX = "kvbraid-draft-"
TOKEN_BYTES = 32
ACCEPTED = b"\x01"

_LENGTH = struct.Struct("<I")
_PEER_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_NETWORK_NAMESPACE = Path("/proc/self/ns/net")


def socket_reach() -> str:
    """Equal in two processes exactly when they see the same abstract sockets and /dev/shm; empty
    where there are none of them."""
    host = host_id()
    if not (sys.platform == "linux" and host and _NETWORK_NAMESPACE.exists()):
        return ""
    return f"{host}:{_NETWORK_NAMESPACE.stat().st_ino}"


def abstract_address(name: str) -> str:
    """Address of the socket `name`. Raises IncompatibleError for a name that is no draft
    service's: it comes from a peer."""
    if not name.startswith(SOCKET_PREFIX):
        raise IncompatibleError(f"{name!r} is not the name of a draft service's socket")
    return f"\0{name}"


def check_same_user(connection: socket.socket) -> None:
    """Raises IncompatibleError unless the peer is a process of this one's user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, user, _ = _PEER_CREDENTIALS.unpack(raw)
    if user != os.getuid():
        raise IncompatibleError(f"the socket's peer is of user {user}, accepted: {os.getuid()}")


def frame_of(message: bytes) -> bytes:
    """`message` as it goes over the socket, with its length before it."""
    return _LENGTH.pack(len(message)) + message


class ReceivedFrames:
    """Cuts what a socket brings into messages of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """The next bytes."""
        self._data += data

    def __iter__(self) -> Iterator[bytes]:
        """The messages that are whole by now; each is given once.

        Raises DataLossError for one that is longer than any may be.
        """
        head = _LENGTH.size
        while len(self._data) >= head:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > self._max_bytes:
                raise DataLossError(f"a frame of {length} bytes, accepted: {self._max_bytes}")
            if len(self._data) < head + length:
                return
            message = bytes(self._data[head : head + length])
            del self._data[: head + length]
            yield message
