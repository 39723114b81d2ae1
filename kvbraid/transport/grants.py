"""Which transfers one rank takes rows for.

Every frame is checked when it arrives, so that a stranger costs no staging slot, and again, row by
row, when it goes into the pool, because the grant may have ended in between.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvbraid.errors import KVBraidError, LeaseLostError
from kvbraid.transport.frame import FrameHead, FrameHeader
from kvbraid.transport.grant import Grant, RankEndpoint, new_transfer_id
from kvbraid.transport.open_grant import OpenGrant

__all__ = ["Grant", "GrantTable", "RankEndpoint", "new_transfer_id"]

EndListener = Callable[[bytes, KVBraidError], None]


class GrantTable:
    """Open grants of one rank. Thread-safe.

    incarnation: of this worker; frames for another one are refused. clock: seconds, monotonic.
    """

    def __init__(
        self, *, rank: int, incarnation: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[bytes, OpenGrant] = {}
        self._listeners: list[EndListener] = []

    def on_end(self, listener: EndListener) -> None:
        """Call `listener(transfer_id, reason)` whenever a grant ends before its last row."""
        self._listeners.append(listener)

    def open(self, grant: Grant) -> None:
        """Take rows of `grant` until `close`. Raises ValueError when its id is open already."""
        entry = OpenGrant(grant, self.rank, self._clock())
        with self._lock:
            if grant.transfer_id in self._open:
                raise ValueError(f"transfer {grant.transfer_id.hex()} is open already")
            self._open[grant.transfer_id] = entry

    def close(self, transfer_id: bytes) -> None:
        """Refuse rows of the transfer from now on and forget it; unknown ids are ignored."""
        with self._lock:
            entry = self._open.pop(transfer_id, None)
        if entry is not None and not entry.is_complete:
            self._tell(transfer_id, LeaseLostError(f"transfer {transfer_id.hex()} was closed"))

    def touch(self, transfer_id: bytes) -> None:
        """Renew the lease; unknown ids are ignored."""
        with self._lock:
            entry = self._open.get(transfer_id)
            if entry is not None:
                entry.touched = self._clock()

    def expire(self, now: float | None = None) -> list[bytes]:
        """End the incomplete grants that nothing arrived for during their lease; returns them.

        `failure` tells of them until `close`. now: seconds of the table's clock. A complete grant
        never expires: its rows have arrived, only other ranks may still wait.
        """
        now = self._clock() if now is None else now
        with self._lock:
            expired = [
                transfer_id
                for transfer_id, entry in self._open.items()
                if entry.failure is None
                and not entry.is_complete
                and now - entry.touched > entry.grant.lease_ms / 1000
            ]
        for transfer_id in expired:
            self.fail(transfer_id, LeaseLostError(f"lease of {transfer_id.hex()} ran out"))
        return expired

    def fail(self, transfer_id: bytes, error: KVBraidError) -> None:
        """Refuse further rows of the transfer with `error`. The first error stays; unknown ids
        are ignored."""
        with self._lock:
            entry = self._open.get(transfer_id)
            if entry is None or entry.failure is not None:
                return
            entry.failure = error
        self._tell(transfer_id, error)

    def failure(self, transfer_id: bytes) -> KVBraidError | None:
        """Why the transfer cannot complete; None while it can, and for unknown ids."""
        with self._lock:
            entry = self._open.get(transfer_id)
            return entry.failure if entry is not None else None

    def rows_landed(self, transfer_id: bytes) -> int:
        """Rows (layer x position x head) in the pool; 0 for unknown ids."""
        with self._lock:
            entry = self._open.get(transfer_id)
            return entry.num_landed if entry is not None else 0

    def rows_expected(self, transfer_id: bytes) -> int:
        """Rows that this rank gets in all; 0 for unknown ids."""
        with self._lock:
            entry = self._open.get(transfer_id)
            return entry.num_expected if entry is not None else 0

    def check(self, header: FrameHeader) -> None:
        """Raise unless the frame may be staged; renews the lease.

        LeaseLostError: unknown, closed or expired grant, or another incarnation.
        DataLossError: other generation or rank, layers or heads that this rank does not get, or
        a payload of another size.
        """
        with self._lock:
            entry = self._entry(header)
            entry.check(header)
            entry.touched = self._clock()

    def record(self, head: FrameHead) -> None:
        """`check`, and count the frame's rows as landed, atomically.

        Raises DataLossError also for positions outside the grant or of other ranks, and for rows
        that are in the pool already: a replay.
        """
        with self._lock:
            self._entry(head.header).record(head, self._clock())

    def is_named_by(self, header: FrameHeader) -> bool:
        """Whether the header names an open grant, its incarnation and its generation."""
        with self._lock:
            entry = self._open.get(header.transfer_id)
            return (
                entry is not None
                and header.incarnation == entry.grant.incarnation
                and header.generation == entry.grant.generation
            )

    def _entry(self, header: FrameHeader) -> OpenGrant:
        name = header.transfer_id.hex()
        entry = self._open.get(header.transfer_id)
        if entry is None:
            raise LeaseLostError(f"transfer {name} is not open on rank {self.rank}")
        if not header.incarnation == entry.grant.incarnation == self.incarnation:
            raise LeaseLostError(
                f"transfer {name} is of incarnation {header.incarnation}, not {self.incarnation}"
            )
        if entry.failure is not None:
            raise type(entry.failure)(str(entry.failure))
        return entry

    def _tell(self, transfer_id: bytes, reason: KVBraidError) -> None:
        for listener in self._listeners:
            listener(transfer_id, reason)
