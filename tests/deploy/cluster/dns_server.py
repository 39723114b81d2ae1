"""The cluster's name server: A records for Services, over UDP."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import cast

_HEADER = struct.Struct("!6H")
_A, _IN = 1, 1
_NO_ERROR, _NO_SUCH_NAME = 0, 3
# As CoreDNS gives for Services.
_TTL_S = 5


class DnsServer(asyncio.DatagramProtocol):
    """Answers for the names in `records`, and that there is no such name for every other one."""

    def __init__(self) -> None:
        self.records: dict[str, list[str]] = {}
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self._transport is not None
        self._transport.sendto(answer(data, self.records), addr)


def answer(query: bytes, records: dict[str, list[str]]) -> bytes:
    """The response to one question. A name without a record of the type has an empty answer."""
    ident, flags, *_ = _HEADER.unpack_from(query)
    name, end = _name_at(query, _HEADER.size)
    kind, _ = struct.unpack_from("!2H", query, end)
    found = records.get(name) if name in records else None
    addresses = found if found and kind == _A else []
    code = _NO_SUCH_NAME if found is None else _NO_ERROR
    # Response, authoritative, recursion available; recursion desired as asked.
    head = _HEADER.pack(ident, 0x8480 | flags & 0x0100 | code, 1, len(addresses), 0, 0)
    rows = (
        struct.pack("!3HIH", 0xC00C, _A, _IN, _TTL_S, 4) + socket.inet_aton(address)
        for address in addresses
    )
    return head + query[_HEADER.size : end + 4] + b"".join(rows)


def _name_at(data: bytes, position: int) -> tuple[str, int]:
    labels = []
    while length := data[position]:
        labels.append(data[position + 1 : position + 1 + length].decode("ascii").lower())
        position += length + 1
    return ".".join(labels), position + 1
