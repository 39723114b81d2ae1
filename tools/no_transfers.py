"""Receiver and sender of a rank without a KV data port: nothing arrives and nothing leaves."""

from __future__ import annotations

from collections.abc import Sequence

from kvbraid.engine.kv_exchange import Gather, Scatter, SendStatus
from kvbraid.errors import IncompatibleError, KVBraidError
from kvbraid.kv.handoff import RowRun
from kvbraid.transport.grants import Grant, GrantTable


class NoReceiver:
    """Takes no rows."""

    def __init__(self) -> None:
        self.grants = GrantTable(rank=0, incarnation=0)

    def poll(self, scatter: Scatter, budget_bytes: int) -> int:
        """Nothing ever arrives."""
        return 0

    def rows_landed(self, transfer_id: bytes) -> int:
        """0."""
        return 0

    def rows_expected(self, transfer_id: bytes) -> int:
        """0."""
        return 0

    def failure(self, transfer_id: bytes) -> KVBraidError | None:
        """None."""
        return None


class NoSender:
    """Sends no rows."""

    def begin(self, grant: Grant, runs: Sequence[RowRun], num_layers: int, row_bytes: int) -> None:
        """Raises IncompatibleError: this rank has no KV data port."""
        raise IncompatibleError("this rank has no KV data port")

    def add_positions(self, transfer_id: bytes, end_position: int) -> None:
        """Nothing to send."""

    def pump(self, gather: Gather, budget_bytes: int) -> int:
        """Nothing to send."""
        return 0

    def status(self, transfer_id: bytes) -> SendStatus:
        """Raises IncompatibleError: this rank has no KV data port."""
        raise IncompatibleError("this rank has no KV data port")

    def cancel(self, transfer_id: bytes) -> None:
        """Nothing to cancel."""

    def forget(self, transfer_id: bytes) -> None:
        """Nothing to forget."""
