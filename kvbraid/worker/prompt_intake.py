"""Takes rows of prompts from the prefill workers that compute them and gives them to a drafter.

The same in a draft service and in a decode worker that drafts itself. Event loop only.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from kvbraid.errors import IncompatibleError, InvalidRequestError, LeaseLostError
from kvbraid.speculative.proposal import Answer, DraftTask, Resync
from kvbraid.transport.draft_terms import DraftTerms
from kvbraid.worker.ingest_grants import IngestGrant, IngestGrants


@dataclass(frozen=True, slots=True)
class PromptTarget:
    """Where a prefill worker's rows belong and what they are."""

    transfer_id: bytes
    incarnation: int
    key: str
    drafter_digest: str
    hidden_size: int
    row_dtype: str


class PromptIntake:
    """Checks rows against their grant and the drafter's terms.

    compute: gives a chunk, under the drafter's own key, to the drafter. open_wait_s: how long a
    prompt waits for its grant, which comes on another way.
    """

    def __init__(
        self,
        *,
        terms: DraftTerms,
        grants: IngestGrants,
        open_wait_s: float,
        compute: Callable[[DraftTask], Awaitable[Answer]],
    ) -> None:
        self.terms = terms
        self.grants = grants
        self._open_wait_s = open_wait_s
        self._compute = compute

    async def begin(self, target: PromptTarget) -> IngestGrant:
        """A prompt's rows are about to come. Waits for its grant to be opened.

        Raises IncompatibleError for rows of another kind, LeaseLostError for another incarnation
        and for a grant that is not opened in time or over.
        """
        terms = self.terms
        if target.incarnation != terms.epoch:
            raise LeaseLostError(f"incarnation {target.incarnation} is over, this is {terms.epoch}")
        pairs = (
            ("drafter digest", target.drafter_digest, terms.drafter_digest),
            ("hidden_size", target.hidden_size, terms.hidden_size),
            ("row_dtype", target.row_dtype, terms.row_dtype),
        )
        reasons = [
            f"{name} {given}, accepted: {ours}" for name, given, ours in pairs if given != ours
        ]
        if reasons:
            raise IncompatibleError("; ".join(reasons))
        grant = await self.grants.begin(target.transfer_id, self._open_wait_s)
        if grant.key.partition("/")[2] != target.key:
            raise LeaseLostError(f"transfer {target.transfer_id.hex()} is not of {target.key!r}")
        return grant

    async def take(self, grant: IngestGrant, chunk: DraftTask) -> int:
        """Take the next rows of a prompt; returns their number. chunk: its key does not matter.

        Raises InvalidRequestError for rows out of order or beyond the grant, LeaseLostError when
        the grant has ended or the drafter has lost what came before.
        """
        num_rows = len(chunk.next_token_ids)
        may_begin = chunk.starts_cold and grant.position == 0
        if chunk.first_position != grant.position and not may_begin:
            raise InvalidRequestError(
                f"first_position is {chunk.first_position}, accepted: {grant.position}",
                field="first_position",
            )
        if chunk.anchor_position > grant.end_position:
            raise InvalidRequestError(
                f"rows end at {chunk.anchor_position}, the grant at {grant.end_position}",
                field="rows",
            )
        if grant.is_over:
            raise LeaseLostError(f"transfer {grant.transfer_id.hex()} takes no rows any more")
        answer = await self._compute(replace(chunk, key=grant.key))
        if isinstance(answer, Resync):
            raise LeaseLostError(f"the drafter lost rows of {grant.key}")
        grant.advance(chunk.anchor_position, time.monotonic())
        return num_rows
