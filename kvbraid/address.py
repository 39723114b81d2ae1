"""host:port as settings, messages and logs write it. The one place that knows about IPv6.

An IPv6 address stands in brackets before a port, [::1]:50051, and without them everywhere else.
"""

from __future__ import annotations

import ipaddress

from kvbraid.errors import ConfigError

_MAX_PORT = 65535


def join_address(host: str, port: int) -> str:
    """`host`:`port`; an IPv6 host gets its brackets, unless it has them already."""
    host = bare_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str, what: str = "address") -> tuple[str, int]:
    """Host without brackets and port of an address of a peer.

    Raises ConfigError, which names `text` as `what`, for anything but NAME:PORT, IPV4:PORT and
    [IPV6]:PORT.
    """
    host, separator, port = text.rpartition(":")
    bare = bare_host(host)
    is_port = port.isascii() and port.isdecimal() and 1 <= int(port) <= _MAX_PORT
    is_host = is_ipv6(bare) if host != bare else bool(host) and not set(host) & set(":[]/ ")
    if not (separator and is_port and is_host):
        raise ConfigError(
            f"{what} is {text!r}, accepted: host:port with a port from 1 to {_MAX_PORT}; an IPv6 "
            f"address in brackets, as in [::1]:50051"
        )
    return bare, int(port)


def bare_host(host: str) -> str:
    """`host` without the brackets of an IPv6 address, as sockets take it."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_any_host(host: str) -> bool:
    """Whether `host` stands for every address of this machine, which no peer could call."""
    try:
        return ipaddress.ip_address(bare_host(host)).is_unspecified
    except ValueError:
        return not host


def is_ipv6(host: str) -> bool:
    """Whether `host`, without brackets, is an IPv6 address."""
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
