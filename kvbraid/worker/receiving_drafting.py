"""A decode worker's own drafter, which takes the rows of prompts from prefill workers.

The event loop serves `DraftService.Ingest`; the engine thread keeps the chunks between its steps.
The drafter itself gets a prompt with the sequence's first drafts: one that is not drafted for costs
a copy in host memory and no forward.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kvbraid.rpc.server import RpcServer
from kvbraid.speculative.embedded_drafting import EmbeddedDrafting
from kvbraid.speculative.proposal import Answer, DraftTask, Proposal
from kvbraid.transport.draft_grant import DraftGrant
from kvbraid.transport.draft_terms import DraftTerms
from kvbraid.transport.grant import new_transfer_id
from kvbraid.worker.ingest_grants import IngestGrants
from kvbraid.worker.ingest_servicer import IngestServicer, add_ingest_service
from kvbraid.worker.prompt_intake import PromptIntake

# A grant that comes by the coordinator may be slower than the rows.
_OPEN_WAIT_S = 2.0
# Of grants of this worker; a draft service has a prefix for each of its peers.
_PREFIX = "own/"


KeepRows = Callable[[str, int, Tensor], None]
"""Gets rows [n, d] of a sequence from a first position on."""


class _Chunk(NamedTuple):
    task: DraftTask
    answer: asyncio.Future[Answer]


@dataclass(slots=True)
class _Expected:
    """Rows [0, end_position) of a prompt, of which num_rows have come. asked_for_s: when its
    sequence was to be drafted for first, by time.monotonic."""

    end_position: int
    num_rows: int = 0
    asked_for_s: float | None = None

    @property
    def is_late(self) -> bool:
        return self.num_rows < self.end_position


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
        rows_patience_s: float,
    ) -> None:
        """address: where prefill workers reach this worker, known once it listens. max_grants:
        prompts whose rows may be on the way. lease_s: longest silence of one. rows_wait_s: longest
        that a sequence's first step waits for its prompt's rows, which leave with the first token.
        rows_patience_s: longest that it decodes plainly for want of them.
        """
        self._drafting = drafting
        self._terms = terms
        self._grants = IngestGrants(max_grants=max_grants, lease_s=lease_s)
        self._lease_s = lease_s
        self._rows_wait_s = rows_wait_s
        self._rows_patience_s = rows_patience_s
        self._loop = asyncio.get_running_loop()
        self._address = address
        self._wake: Callable[[], None] = lambda: None
        self._keep: KeepRows = lambda key, first_position, rows: None
        self._chunks: deque[_Chunk] = deque()
        self._arrived = threading.Event()
        # Sequences whose prompt's rows may be on the way.
        self._expected: dict[str, _Expected] = {}

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

    def keep_in(self, keep: KeepRows) -> None:
        """Give the rows that arrive to `keep`, in the engine thread."""
        self._keep = keep

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
        self._expected[own] = _Expected(end_position)
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
        """See GrantingDrafting. Rows of a sequence that has ended go nowhere."""
        while self._chunks:
            task, answer = self._chunks.popleft()
            if task.key in self._expected:
                self._keep(task.key.removeprefix(_PREFIX), task.first_position, task.rows)
                self._expected[task.key].num_rows = task.anchor_position
            self._loop.call_soon_threadsafe(_resolve, answer)

    def await_rows(self, keys: Sequence[str]) -> Collection[str]:
        """See GrantingDrafting. A sequence that is not late is on its own afterwards: rows that
        come later are refused."""
        if not self._expected:
            return ()
        now = time.monotonic()
        expected = {key: e for key in keys if (e := self._expected.get(_PREFIX + key)) is not None}
        for one in expected.values():
            one.asked_for_s = now if one.asked_for_s is None else one.asked_for_s
        self._take_rows_until(now + self._rows_wait_s, list(expected.values()))
        late = {key for key, one in expected.items() if one.is_late and self._has_patience(one)}
        for key in keys:
            if key not in late:
                self._close(_PREFIX + key)
        return late

    def _take_rows_until(self, give_up_s: float, expected: Sequence[_Expected]) -> None:
        self.take_rows()
        while any(one.is_late for one in expected):
            self._arrived.clear()
            left_s = give_up_s - time.monotonic()
            if not self._chunks and (left_s <= 0 or not self._arrived.wait(left_s)):
                break
            self.take_rows()

    def _has_patience(self, expected: _Expected) -> bool:
        assert expected.asked_for_s is not None
        return time.monotonic() - expected.asked_for_s < self._rows_patience_s

    def step(self, tasks: Sequence[DraftTask]) -> list[Answer | None]:
        """See Drafting."""
        return self._drafting.step(tasks)

    def drop(self, key: str) -> None:
        """See Drafting."""
        self._close(_PREFIX + key)
        self._drafting.drop(key)

    def _close(self, own_key: str) -> None:
        if self._expected.pop(own_key, None) is not None:
            self._loop.call_soon_threadsafe(self._grants.close, own_key)


def _resolve(answer: asyncio.Future[Answer]) -> None:
    if not answer.done():
        answer.set_result(Proposal())
