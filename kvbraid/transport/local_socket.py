"""Unix-domain stream sockets between two processes of one user and host."""

from __future__ import annotations

import os
import socket
import struct
import sys
from pathlib import Path

from kvbraid.errors import IncompatibleError
from kvbraid.transport.staging import host_id

SOCKET_PREFIX = "kvbraid-draft-"

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
