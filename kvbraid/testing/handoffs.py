"""How a fake prefill worker tells a fake decode worker that the rows are there."""

from __future__ import annotations

import asyncio
from collections import defaultdict


class Handoffs:
    """Transfers by id; shared by the fake workers of a cluster."""

    def __init__(self) -> None:
        self._landed: defaultdict[bytes, asyncio.Event] = defaultdict(asyncio.Event)
        self._first: defaultdict[bytes, asyncio.Future[int]] = defaultdict(
            lambda: asyncio.get_running_loop().create_future()
        )

    def rows_landed(self, transfer_id: bytes) -> None:
        """Every row of the transfer is with the decode worker."""
        self._landed[transfer_id].set()

    def start(self, transfer_id: bytes, first_token_id: int) -> None:
        """The first token of the transfer."""
        if not self._first[transfer_id].done():
            self._first[transfer_id].set_result(first_token_id)

    async def wait(self, transfer_id: bytes) -> int:
        """The first token, once it and every row are here."""
        await self._landed[transfer_id].wait()
        return await self._first[transfer_id]
