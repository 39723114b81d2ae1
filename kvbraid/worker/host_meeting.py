"""Hosts of one worker wait for each other before any of them starts a rank.

Pods of a group start minutes apart when one node still pulls the image, while ranks give up on
their peers after a minute. So host 0 listens, every other host says who it is and keeps its
connection, and host 0 answers all of them once the last has come. Whoever loses the connection
before that comes again; the newest connection of a host counts.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from dataclasses import dataclass

from kvbraid.errors import ConfigError, StartupError

logger = logging.getLogger(__name__)

_GO = b"go\n"
_RETRY_S = 0.5
_CONNECT_TIMEOUT_S = 5.0
_HELLO_TIMEOUT_S = 5.0
_HELLO_LIMIT = 256


@dataclass(frozen=True, slots=True)
class MeetingPlan:
    """Who meets where. leader: host 0's name or address; port: where it listens."""

    host_index: int
    num_hosts: int
    ranks_per_host: int
    leader: str
    port: int
    timeout_s: float


class HostsMissingError(StartupError):
    """Not every host has come in time."""


def meet_hosts(plan: MeetingPlan) -> None:
    """Returns once every host of the worker has called it.

    Raises HostsMissingError after plan.timeout_s, ConfigError on host 0 when another host plans
    another number of hosts or ranks.
    """
    deadline = time.monotonic() + plan.timeout_s
    if plan.num_hosts == 1:
        return
    if plan.host_index == 0:
        _gather(plan, deadline)
    else:
        _attend(plan, deadline)


def _gather(plan: MeetingPlan, deadline: float) -> None:
    guests: dict[int, socket.socket] = {}
    try:
        with _listen(plan.port) as listener:
            while missing := set(range(1, plan.num_hosts)) - guests.keys():
                listener.settimeout(_left_s(deadline, f"hosts {sorted(missing)} have not come"))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                _welcome(plan, guests, connection)
        for connection in guests.values():
            connection.sendall(_GO)
    except OSError as error:
        raise HostsMissingError(f"the hosts of this worker cannot meet: {error}") from error
    finally:
        for connection in guests.values():
            connection.close()


def _welcome(
    plan: MeetingPlan, guests: dict[int, socket.socket], connection: socket.socket
) -> None:
    index = None
    try:
        index = _host_index(plan, connection)
    finally:
        if index is None:
            connection.close()
    if index is None:
        return
    if index in guests:
        guests[index].close()
    guests[index] = connection
    logger.info("host %d of %d has come", index, plan.num_hosts)


def _host_index(plan: MeetingPlan, connection: socket.socket) -> int | None:
    """Who connected; None for something that is no host of a worker."""
    connection.settimeout(_HELLO_TIMEOUT_S)
    try:
        with connection.makefile("rb") as lines:
            hello = json.loads(lines.readline(_HELLO_LIMIT))
        index, *shape = (int(hello[key]) for key in ("host", "num_hosts", "ranks_per_host"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("a connection that is no host of this worker: %s", error)
        return None
    if shape != [plan.num_hosts, plan.ranks_per_host] or not 0 < index < plan.num_hosts:
        raise ConfigError(
            f"host {index} plans {shape[0]} hosts of {shape[1]} ranks, host 0 plans "
            f"{plan.num_hosts} of {plan.ranks_per_host}"
        )
    return index


def _attend(plan: MeetingPlan, deadline: float) -> None:
    hello = {
        "host": plan.host_index,
        "num_hosts": plan.num_hosts,
        "ranks_per_host": plan.ranks_per_host,
    }
    while True:
        left_s = _left_s(deadline, f"host 0 at {plan.leader}:{plan.port} has not called")
        try:
            with socket.create_connection(
                (plan.leader, plan.port), _CONNECT_TIMEOUT_S
            ) as connection:
                connection.settimeout(left_s)
                connection.sendall(json.dumps(hello).encode() + b"\n")
                if connection.recv(len(_GO), socket.MSG_WAITALL) == _GO:
                    return
        except OSError as error:
            # Not there yet: its name may not even resolve before its pod exists.
            logger.info("host 0 at %s is not there yet: %s", plan.leader, error)
        time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))


def _left_s(deadline: float, missing: str) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise HostsMissingError(missing)
    return left_s


def _listen(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)
