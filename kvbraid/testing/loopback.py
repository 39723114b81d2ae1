"""Which loopback addresses this machine has."""

from __future__ import annotations

import socket


def has_ipv6() -> bool:
    """Whether ::1 can be listened on."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
