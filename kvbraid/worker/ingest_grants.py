"""Prompts whose rows prefill workers may push, from a decode worker's word to the first step."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvbraid.errors import InvalidRequestError, LeaseLostError
from kvbraid.speculative.proposal import DraftTask
from kvbraid.transport.draft_grant import TRANSFER_ID_BYTES


class IngestGrant:
    """Rows [0, end_position) of the sequence `key` (the proposer's name) may be pushed.

    position: rows before it are with the proposer. is_over: no more will come.
    """

    def __init__(self, key: str, transfer_id: bytes, end_position: int, now: float) -> None:
        self.key = key
        self.transfer_id = transfer_id
        self.end_position = end_position
        self.position = 0
        self.has_begun = False
        self.is_over = False
        self.touched = now
        self._changed = asyncio.Event()

    def advance(self, position: int, now: float) -> None:
        """Rows before `position` are with the proposer now."""
        self.position, self.has_begun, self.touched = position, True, now
        self.is_over = position >= self.end_position
        self._changed.set()

    def end(self) -> None:
        """Take no more rows."""
        self.is_over = True
        self._changed.set()

    async def rows_come(self, num_rows: int) -> None:
        """Returns once the rows [0, num_rows) are here or will not come."""
        while self.position < num_rows and not self.is_over:
            self._changed.clear()
            await self._changed.wait()


class IngestGrants:
    """Grants by transfer and by sequence; the oldest go when there are more than `max_grants`.

    lease_s: a grant for which nothing comes for so long is over. clock: seconds, monotonic.
    """

    def __init__(
        self, *, max_grants: int, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_grants = max_grants
        self._lease_s = lease_s
        self._clock = clock
        self._by_transfer: OrderedDict[bytes, IngestGrant] = OrderedDict()
        self._by_key: dict[str, IngestGrant] = {}
        self._awaited: dict[bytes, asyncio.Future[IngestGrant]] = {}

    def open(self, key: str, transfer_id: bytes, end_position: int) -> None:
        """Take rows. An older grant of the sequence ends. Raises InvalidRequestError for an id
        that is in use or malformed."""
        if len(transfer_id) != TRANSFER_ID_BYTES or transfer_id in self._by_transfer:
            raise InvalidRequestError(
                f"transfer_id {transfer_id.hex()} must be {TRANSFER_ID_BYTES} bytes and new",
                field="transfer_id",
            )
        if (older := self._by_key.get(key)) is not None:
            self._remove(older)
        self._make_room()
        grant = IngestGrant(key, transfer_id, end_position, self._clock())
        self._by_transfer[transfer_id] = self._by_key[key] = grant
        waiter = self._awaited.pop(transfer_id, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(grant)

    async def begin(self, transfer_id: bytes, wait_s: float) -> IngestGrant:
        """The transfer's grant, waiting up to wait_s for it to be opened.

        Raises LeaseLostError when it is not, when it is over, and for a transfer that another call
        pushes already.
        """
        grant = self._by_transfer.get(transfer_id)
        if grant is None:
            grant = await self._opened(transfer_id, wait_s)
        if grant.has_begun or grant.is_over:
            raise LeaseLostError(f"transfer {transfer_id.hex()} takes no rows any more")
        grant.has_begun = True
        return grant

    def concern(self, keys: Iterable[str]) -> bool:
        """Whether one of the sequences `keys` has a grant. From any thread: it looks names up, one
        by one, and nothing else."""
        return bool(self._by_key) and any(key in self._by_key for key in keys)

    async def settle(self, tasks: Sequence[DraftTask], wait_s: float) -> Sequence[DraftTask]:
        """`tasks` as they go to the proposer: those of sequences with a grant wait, up to wait_s
        in all, for the rows before them, and start cold where these do not come."""
        granted = [task for task in tasks if task.key in self._by_key] if self._by_key else []
        if not granted:
            return tasks
        waits = [self._by_key[task.key].rows_come(task.first_position) for task in granted]
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.gather(*waits)
        except TimeoutError:
            pass  # those that lack rows start cold
        return [self._settled(task) for task in tasks]

    def close(self, key: str) -> None:
        """The sequence has ended or goes on without its prompt's rows; unknown ones are ignored."""
        if (grant := self._by_key.get(key)) is not None:
            self._remove(grant)

    @property
    def num_open(self) -> int:
        """Grants that may still get rows."""
        return sum(not grant.is_over for grant in self._by_transfer.values())

    def _settled(self, task: DraftTask) -> DraftTask:
        grant = self._by_key.get(task.key)
        if grant is None:
            return task
        self._remove(grant)
        return task if grant.position >= task.first_position else replace(task, starts_cold=True)

    def _remove(self, grant: IngestGrant) -> None:
        grant.end()
        del self._by_transfer[grant.transfer_id]
        del self._by_key[grant.key]

    def _make_room(self) -> None:
        now = self._clock()
        for grant in self._by_transfer.values():
            if now - grant.touched > self._lease_s:
                grant.end()
        while len(self._by_transfer) >= self._max_grants:
            self._remove(next(iter(self._by_transfer.values())))

    async def _opened(self, transfer_id: bytes, wait_s: float) -> IngestGrant:
        if len(self._awaited) >= self._max_grants or transfer_id in self._awaited:
            raise LeaseLostError(f"transfer {transfer_id.hex()} is not open")
        waiter: asyncio.Future[IngestGrant] = asyncio.get_running_loop().create_future()
        self._awaited[transfer_id] = waiter
        try:
            async with asyncio.timeout(wait_s):
                return await waiter
        except TimeoutError:
            raise LeaseLostError(
                f"transfer {transfer_id.hex()} was not opened within {wait_s} s"
            ) from None
        finally:
            self._awaited.pop(transfer_id, None)
