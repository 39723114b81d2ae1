"""What a way of moving frames to another rank must do, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from kvbraid.transport.grant import RankEndpoint
from kvbraid.transport.outbox import OutFrame

MoverChoice = Literal["auto", "shared_memory", "grpc_push"]


class PushCall(Protocol):
    """One open call: frames of one transfer to one rank. All errors are KVBraidErrors."""

    @property
    def num_rows_acked(self) -> int:
        """Rows that the receiver has reported to be in its pool so far."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether the peer has ended the call already; `finish` then tells why."""
        ...

    async def send(self, frame: OutFrame) -> None:
        """Push one frame; returns when there is room for another, so memory stays bounded."""
        ...

    async def finish(self) -> None:
        """Returns once every row sent is in the receiver's pool."""
        ...

    async def cancel(self) -> None:
        """Give the call up; nothing is sent afterwards. Harmless after the end."""
        ...


class Mover(Protocol):
    """A way of moving frames."""

    @property
    def name(self) -> str:
        """Name for logs and metrics."""
        ...

    def open(
        self, endpoint: RankEndpoint, *, timeout_s: float, on_event: Callable[[], None]
    ) -> PushCall:
        """Open a call; its first frame must be a heartbeat, which names the transfer.

        The call fails with DeadlineError after `timeout_s`. on_event is called when the peer
        ends the call and when it acknowledges rows.
        """
        ...


def choose_mover(choice: MoverChoice, endpoint: RankEndpoint, own_host_id: str) -> str:
    """Name of the mover to `endpoint`: shared memory where it reaches, gRPC push otherwise."""
    if choice != "auto":
        return choice
    reaches = bool(endpoint.ring_name) and endpoint.host_id == own_host_id != ""
    return "shared_memory" if reaches else "grpc_push"


def movers_used(
    choice: MoverChoice, endpoints: Sequence[RankEndpoint], own_host_id: str
) -> Literal["shared_memory", "grpc_push", "mixed"]:
    """How rows reach the ranks of one worker; mixed where some are on another host."""
    names = {choose_mover(choice, endpoint, own_host_id) for endpoint in endpoints}
    if names == {"shared_memory"}:
        return "shared_memory"
    return "grpc_push" if names == {"grpc_push"} else "mixed"
