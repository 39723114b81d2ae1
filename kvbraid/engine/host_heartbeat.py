"""Notices within seconds that another host of this worker is dead or out of reach.

The ranks of one host watch one another through shared memory and end together (heartbeat.py), so
one link a host is enough: local rank 0 of every other host keeps a TCP connection to rank 0, and
both ends send a beat now and then from a thread of their own, whatever the engine thread waits
for. A host is lost when its connection ends without a farewell (the process is gone, seen at
once), when the system gets no acknowledgement for `timeout_s` (the host or the network is gone),
or when it sends nothing for ten times that (a process that is stopped, alone on its host: from
outside it looks like one that holds the interpreter lock for long).
"""

from __future__ import annotations

import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

import torch

from attention.interface import Group
from kvbraid.engine.rank_lost import RankLostError
from kvbraid.engine.ranks import RankContext

logger = logging.getLogger(__name__)

_BEAT, _FAREWELL = b".", b"!"
_HELLO = struct.Struct("<qq")  # secret, rank
_BUSY_FACTOR = 10
_HELLO_TIMEOUT_S = 5.0


class HostLink:
    """A connection to the process that beats for another host. One thread uses it."""

    def __init__(self, rank: int, connection: socket.socket, timeout_s: float) -> None:
        """rank: the peer's. The connection has said hello and now belongs to this link."""
        self.has_left = False
        self._name = f"the host of rank {rank}"
        self._connection = connection
        self._silence_limit_s = timeout_s * _BUSY_FACTOR
        self._silent_s = 0.0
        milliseconds = round(timeout_s * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)

    def beat(self, elapsed_s: float) -> str | None:
        """Send one beat and read the peer's; why the peer is lost, or None."""
        try:
            received = self._read()
            if _FAREWELL in received:
                self.has_left = True
                return None
            self._send(_BEAT)
        except OSError as error:
            return f"{self._name} is gone ({error})"
        self._silent_s = 0.0 if received else self._silent_s + elapsed_s
        if self._silent_s > self._silence_limit_s:
            return f"{self._name} has not given a sign of life for {self._silent_s:.1f} s"
        return None

    def leave(self) -> None:
        """Say that this process ends on purpose, and close."""
        try:
            self._send(_FAREWELL)
            self._connection.shutdown(socket.SHUT_WR)
        except OSError as error:
            logger.info("%s had already left: %s", self._name, error)
        self._connection.close()

    def _read(self) -> bytes:
        """What has come, empty when nothing has."""
        try:
            received = self._connection.recv(4096)
        except BlockingIOError:
            return b""
        if not received:
            raise ConnectionResetError("it closed the connection")
        return received

    def _send(self, beat: bytes) -> None:
        try:
            self._connection.send(beat)
        except BlockingIOError:
            logger.debug("%s takes no more beats", self._name)


class HostHeartbeat:
    """This process's beat to other hosts and its watch over them.

    on_lost(reason) is called once, from the heartbeat thread. A process that calls `stop` leaves
    in peace.
    """

    def __init__(
        self,
        links: Sequence[HostLink],
        on_lost: Callable[[str], None],
        *,
        interval_s: float = 0.1,
    ) -> None:
        """No links: nothing to watch, as in every process but the first of its host."""
        self._links = list(links)
        self._on_lost = on_lost
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat and watch."""
        if self._links:
            self._thread.start()

    def stop(self) -> None:
        """Tell the other hosts that this process ends on purpose, and stop watching them."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        for link in self._links:
            link.leave()
        self._links.clear()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(self._interval_s):
            now = time.monotonic()
            # After a pause of this process, peers had no chance to be heard either.
            elapsed_s = min(now - last, 2 * self._interval_s)
            last = now
            for link in self._links:
                reason = None if link.has_left else link.beat(elapsed_s)
                if reason is not None and not self._stop.is_set():
                    self._on_lost(reason)
                    return


def connect_hosts(
    context: RankContext,
    group: Group,
    on_lost: Callable[[str], None],
    *,
    timeout_s: float,
    start_timeout_s: float = 60.0,
) -> HostHeartbeat:
    """The heartbeat between the hosts of a worker; without links where there is one host.

    group: takes CPU tensors and has every rank of the worker; every rank calls this. Raises
    RankLostError when a host has not connected within start_timeout_s.
    """
    if context.is_one_host:
        return HostHeartbeat([], on_lost)
    locals_ = group.all_gather(torch.tensor([context.local_rank])).flatten().tolist()
    leaders = {rank for rank, local in enumerate(locals_) if local == 0 and rank > 0}
    deadline = time.monotonic() + start_timeout_s
    try:
        links = _connections(context, group, leaders, deadline)
    except OSError as error:
        raise RankLostError(f"the hosts of this worker cannot connect: {error}") from error
    return HostHeartbeat([HostLink(r, c, timeout_s) for r, c in links.items()], on_lost)


def _connections(
    context: RankContext, group: Group, leaders: set[int], deadline: float
) -> dict[int, socket.socket]:
    """Rank 0's connections by rank of the peer; a leader's one to rank 0; nobody else has any."""
    if context.rank == 0:
        secret = secrets.randbits(63)
        with _listen() as listener:
            group.broadcast(torch.tensor([listener.getsockname()[1], secret]), 0)
            return _accept(listener, secret, leaders, deadline)
    port, secret = group.broadcast(torch.zeros(2, dtype=torch.int64), 0).tolist()
    if context.rank not in leaders:
        return {}
    left_s = max(0.1, deadline - time.monotonic())
    connection = socket.create_connection((context.master_addr, port), left_s)
    connection.sendall(_HELLO.pack(secret, context.rank))
    return {0: connection}


def _listen() -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=both)


def _accept(
    listener: socket.socket, secret: int, leaders: set[int], deadline: float
) -> dict[int, socket.socket]:
    links: dict[int, socket.socket] = {}
    while missing := leaders - links.keys():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"the host of rank {min(missing)} has not come in time")
        listener.settimeout(left_s)
        try:
            connection, address = listener.accept()
        except TimeoutError:
            continue
        rank = _greeted_rank(connection, secret)
        if rank in missing:
            links[rank] = connection
        else:
            logger.warning("%s is no host of this worker", address[0])
            connection.close()
    return links


def _greeted_rank(connection: socket.socket, secret: int) -> int:
    """The rank that a peer with the secret has; -1 for anybody else."""
    connection.settimeout(_HELLO_TIMEOUT_S)
    try:
        hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
    except OSError as error:
        logger.info("a connection said no hello: %s", error)
        return -1
    if len(hello) < _HELLO.size:
        return -1
    told, rank = _HELLO.unpack(hello)
    return int(rank) if told == secret else -1
