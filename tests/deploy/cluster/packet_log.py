"""Who opened a connection to whom: every TCP SYN and UDP packet that pods hand to their node."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct

_ETH_P_IP = 0x0800
_SO_ATTACH_FILTER = 26
_OUTGOING = 4
_TCP, _UDP = 6, 17
# (code, jump if true, jump if false, operand) of classic BPF on an IP packet: all of UDP, and of
# TCP what has SYN without ACK.
_FILTER = (
    (0x30, 0, 0, 9),  # A = protocol
    (0x15, 5, 0, _UDP),  # UDP: keep
    (0x15, 0, 5, _TCP),  # not TCP: drop
    (0xB1, 0, 0, 0),  # X = length of the IP header
    (0x50, 0, 0, 13),  # A = TCP flags
    (0x54, 0, 0, 0x12),  # A &= SYN | ACK
    (0x15, 0, 1, 0x02),  # SYN alone: keep
    (0x06, 0, 0, 0xFFFF),
    (0x06, 0, 0, 0),
)

Flow = tuple[str, str, str, int]


class PacketLog:
    """`flows`: (source, destination, protocol, destination port) of whatever was tried, allowed
    or not. Packets of the node itself, probes and forwarded connections, are not among them."""

    def __init__(self) -> None:
        self.flows: set[Flow] = set()
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETH_P_IP))
        code = b"".join(struct.pack("HBBI", *step) for step in _FILTER)
        program = ctypes.create_string_buffer(code)
        self._socket.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("HL", len(_FILTER), ctypes.addressof(program)),
        )
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def _read(self) -> None:
        packet, address = self._socket.recvfrom(128)
        if address[2] == _OUTGOING:
            return
        start = (packet[0] & 0xF) * 4
        source, destination = (socket.inet_ntoa(packet[at : at + 4]) for at in (12, 16))
        (port,) = struct.unpack_from("!H", packet, start + 2)
        protocol = "TCP" if packet[9] == _TCP else "UDP"
        self.flows.add((source, destination, protocol, port))
