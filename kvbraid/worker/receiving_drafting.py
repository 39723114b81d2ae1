"""A decode worker's own drafter, which takes the rows of prompts from prefill workers.

The event loop serves `DraftService.Ingest`; the engine thread, the drafter's only user, takes the
chunks between its steps.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvbraid.errors import UnavailableError
from kvbraid.rpc.server import RpcServer
from kvbraid.speculative.embedded_drafting import EmbeddedDrafting
from kvbraid.speculative.proposal import Answer, DraftTask
from kvbraid.transport.draft_grant import DraftGrant
from kvbraid.transport.draft_terms import DraftTerms
from kvbraid.transport.grant import new_transfer_id
from kvbraid.worker.ingest_grants import IngestGrants
from kvbraid.worker.ingest_servicer import IngestServicer, add_ingest_service
from kvbraid.worker.prompt_intake import PromptIntake

# A grant that comes by the coordinator may be slower than the rows.
_OPEN_WAIT_S = 2.0
# Names sequences of this worker; a draft service has a prefix for each of its peers.
_PREFIX = "own/"


class _Chunk(NamedTuple):
    task: DraftTask
    answer: asyncio.Future[Answer]


class ReceivingDrafting:
    """See `kvbraid.engine.drafted_decoding.GrantingDrafting`."""

    def __init__(
        self,
        drafting: EmbeddedDrafting,
        terms: DraftTerms,
        *,
        address: Callable[[], str],
        max_grants: int,
        lease_s: float,
        rows_wait_s: float,
    ) -> None:
        """address: where prefill workers reach this worker, known once it listens. max_grants:
        prompts whose rows may be on the way. lease_s: longest silence of one. rows_wait_s: longest
        that a sequence's first step waits for its prompt's rows, which leave with the first token.
        """
        self._drafting = drafting
        self._terms = terms
        self._grants = IngestGrants(max_grants=max_grants, lease_s=lease_s)
        self._lease_s = lease_s
        self._rows_wait_s = rows_wait_s
        self._loop = asyncio.get_running_loop()
        self._address = address
        self._wake: Callable[[], None] = lambda: None
        self._chunks: deque[_Chunk] = deque()
        self._arrived = threading.Event()
        # Of sequences whose prompt's rows are on the way: rows held so far.
        self._expected: dict[str, int] = {}

    # Event loop

    def serve_on(self, server: RpcServer) -> None:
        """Take rows on `server`, before it starts."""
        intake = PromptIntake(
            terms=self._terms,
            grants=self._grants,
            open_wait_s=_OPEN_WAIT_S,
            compute=self._compute,
        )
        add_ingest_service(server, IngestServicer(intake, lease_s=self._lease_s))

    def on_rows(self, wake: Callable[[], None]) -> None:
        """Call `wake` when there is something for `take_rows`."""
        self._wake = wake

    async def _compute(self, task: DraftTask) -> Answer:
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._chunks.append(_Chunk(task, answer))
        self._arrived.set()
        self._wake()
        return await answer

    # Engine thread

    @property
    def max_draft_tokens(self) -> int:
        """See Drafting."""
        return self._drafting.max_draft_tokens

    def open_grant(self, key: str, end_position: int) -> DraftGrant | None:
        """See GrantingDrafting."""
        transfer_id, own = new_transfer_id(), _PREFIX + key
        self._expected[own] = 0
        self._loop.call_soon_threadsafe(self._grants.open, own, transfer_id, end_position)
        return DraftGrant(
            address=self._address(),
            transfer_id=transfer_id,
            incarnation=self._terms.epoch,
            key=key,
            row_dtype=self._terms.row_dtype,
            max_rows_per_message=self._terms.max_rows_per_message,
        )

    def take_rows(self) -> None:
        """See GrantingDrafting."""
        while self._chunks:
            chunk = self._chunks.popleft()
            (answer,) = self._drafting.step([chunk.task])
            if chunk.task.key in self._expected:
                self._expected[chunk.task.key] = chunk.task.anchor_position
            self._loop.call_soon_threadsafe(_resolve, chunk.answer, answer)

    def step(self, tasks: Sequence[DraftTask]) -> list[Answer | None]:
        """See Drafting. Waits a moment for rows of prompts that are on the way."""
        own = [replace(task, key=_PREFIX + task.key) for task in tasks]
        self._await_rows(own)
        return self._drafting.step([self._settled(task) for task in own])

    def drop(self, key: str) -> None:
        """See Drafting."""
        own = _PREFIX + key
        self._close(own)
        self._drafting.drop(own)

    def _await_rows(self, tasks: Sequence[DraftTask]) -> None:
        give_up = time.monotonic() + self._rows_wait_s
        self.take_rows()
        while any(self._lacks_rows(task) for task in tasks):
            self._arrived.clear()
            left_s = give_up - time.monotonic()
            if not self._chunks and (left_s <= 0 or not self._arrived.wait(left_s)):
                return
            self.take_rows()

    def _lacks_rows(self, task: DraftTask) -> bool:
        return self._expected.get(task.key, task.first_position) < task.first_position

    def _settled(self, task: DraftTask) -> DraftTask:
        """After its first step a sequence is on its own: rows that come later are refused."""
        is_cold = self._lacks_rows(task)
        self._close(task.key)
        return replace(task, starts_cold=True) if is_cold else task

    def _close(self, own_key: str) -> None:
        if self._expected.pop(own_key, None) is not None:
            self._loop.call_soon_threadsafe(self._grants.close, own_key)


def _resolve(answer: asyncio.Future[Answer], value: Answer | None) -> None:
    if answer.done():
        return
    if value is None:
        answer.set_exception(UnavailableError("the drafter gave no answer"))
    else:
        answer.set_result(value)
