"""Rows of prompts on their way to the drafter of the worker that will decode them.

A prefill worker's part in speculation: while a prompt is computed, rank 0 pushes the fused row of
each token, found in the prefix cache or computed, to where the handoff's grant says.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvbraid.engine.sequence import EngineRequest, Sequence, SequenceKey
from kvbraid.engine.step_plan import StepPlan
from kvbraid.kv.slots import slots_between
from kvbraid.speculative.fused_rows import FusedRows
from kvbraid.transport.draft_grant import DraftGrant

# After so many prompts that nobody drafts for, rows are no longer made for the prefix cache: every
# prompt would take longer for what few of them need.
_NUM_REMEMBERED = 8


class RowOutlet(Protocol):
    """Takes rows without waiting; `kvbraid.worker.row_pusher.RowPusher`."""

    def begin(self, grant: DraftGrant) -> None:
        """A prompt whose rows will be pushed."""
        ...

    def push(
        self,
        transfer_id: bytes,
        first_position: int,
        rows: Tensor,
        next_token_ids: Seq[int],
        *,
        starts_cold: bool = False,
    ) -> None:
        """Rows [m, d] that follow on those before, each with the token at its position + 1."""
        ...

    def finish(self, transfer_id: bytes) -> None:
        """No more rows will come."""
        ...

    def cancel(self, transfer_id: bytes) -> None:
        """The prompt was given up."""
        ...


@dataclass(slots=True)
class _Pushed:
    grant: DraftGrant
    num_rows: int = 0


class PromptRows:
    """`kvbraid.engine.speculation.Speculation` of a prefill worker.

    Rows are kept while some of the last prompts were to be drafted for. Where drafting has not paid
    for longer, pages enter the prefix cache without theirs: what is found there later starts cold.
    """

    def __init__(self, outlet: RowOutlet, rows: FusedRows, *, logical_page_size: int) -> None:
        self._outlet = outlet
        self._rows = rows
        self._page_size = logical_page_size
        self._pushed: dict[SequenceKey, _Pushed] = {}
        # Prompts that are to be pushed and have not ended, and how many others came since the last.
        self._granted: set[SequenceKey] = set()
        self._num_others = 0
        self.wants_taps = True

    @property
    def wants_prompt_taps(self) -> bool:
        """See Speculation: a prefill worker computes nothing else."""
        return self.wants_taps

    def queued(self, request: EngineRequest) -> None:
        """See Speculation. Whether its rows will be wanted is known before they are computed."""
        self._num_others += 1
        if request.destination is not None and request.destination.draft is not None:
            self._granted.add(request.key)
            self._num_others = 0
        self.wants_taps = bool(self._granted) or self._num_others < _NUM_REMEMBERED

    def open_grant(self, sequence: Sequence) -> DraftGrant | None:
        """See Speculation: a prefill worker takes no rows of others."""
        return None

    def draft(self, active: Seq[Sequence]) -> None:
        """Push the rows that were computed since the last step."""
        for sequence in active:
            destination = sequence.request.destination
            if destination is not None and destination.draft is not None:
                self._push(sequence, self._beginning(sequence, destination.draft))

    def verified(self, plan: StepPlan, tokens: Mapping[int, Seq[int]], seconds: float) -> None:
        """See Speculation: nothing was drafted."""

    def meanwhile(self) -> None:
        """See Speculation: nothing."""

    def drop(self, sequence: Sequence) -> None:
        """See Speculation. What is pushed already arrives; an unfinished prompt is given up."""
        self._granted.discard(sequence.request.key)
        pushed = self._pushed.pop(sequence.request.key, None)
        if pushed is not None:
            self._outlet.cancel(pushed.grant.transfer_id)

    def _beginning(self, sequence: Sequence, grant: DraftGrant) -> _Pushed:
        pushed = self._pushed.get(sequence.request.key)
        if pushed is None:
            pushed = self._pushed[sequence.request.key] = _Pushed(grant)
            self._outlet.begin(grant)
        return pushed

    def _push(self, sequence: Sequence, pushed: _Pushed) -> None:
        """A row goes with the token behind it, so the newest token's own waits for the next."""
        first = pushed.num_rows
        end = min(sequence.num_computed_tokens, len(sequence.token_ids) - 1)
        if end <= first:
            return
        slots = slots_between(sequence.pages, first, end, self._page_size)
        num_missing = self._rows.num_missing(slots) if first == 0 else 0
        begin = first + num_missing
        self._outlet.push(
            pushed.grant.transfer_id,
            begin,
            self._rows.read(slots_between(sequence.pages, begin, end, self._page_size)),
            sequence.token_ids[begin + 1 : end + 1],
            starts_cold=num_missing > 0,
        )
        pushed.num_rows = end
        if end == len(sequence.request.token_ids):
            self._outlet.finish(pushed.grant.transfer_id)
