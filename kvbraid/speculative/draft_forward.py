"""A drafter's step on its device and how it is launched: eagerly here, or as captured graphs in
`captured_drafting`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from attention.kv_rows import on_device
from kvbraid.speculative.context_rows import ContextRows, context_chunks
from kvbraid.speculative.draft_batch import DraftBatch
from kvbraid.speculative.draft_compute import Anchors, DraftCompute
from kvbraid.speculative.draft_kv import DraftKv
from kvbraid.speculative.draft_sampler import DraftSampler
from kvbraid.speculative.draft_session import Admitted
from kvbraid.speculative.proposal import DraftTask, Proposal


class DraftForward(Protocol):
    """Runs a drafter. Pages of the KV are there for all rows, and for those that drafts need."""

    def ingest(self, admitted: Sequence[Admitted]) -> None:
        """Take the rows of all tasks."""
        ...

    def draft(self, drafting: Sequence[Admitted]) -> list[Proposal]:
        """Drafts behind the anchors of these, which all want some; one proposal each."""
        ...


class EagerDraftForward:
    """Launches every kernel anew: serves all steps on all devices."""

    def __init__(self, compute: DraftCompute, kv: DraftKv) -> None:
        self._compute = compute
        self._kv = kv

    def ingest(self, admitted: Sequence[Admitted]) -> None:
        """See DraftForward."""
        context = ContextRows.of(admitted, self._kv.spare_slot)
        if context is None:
            return
        for chunk in context_chunks(context, self._kv, self._compute.dtype):
            self._compute.ingest(chunk)

    def draft(self, drafting: Sequence[Admitted]) -> list[Proposal]:
        """See DraftForward."""
        compute, kv = self._compute, self._kv
        batch = DraftBatch.of(drafting, compute.config.max_draft_tokens)
        lengths = compute.first_lengths(batch.num_rows)
        sampler = DraftSampler(batch.tasks, compute.vocabulary, kv.device)
        drawn = compute.draft(
            Anchors(
                on_device(batch.anchor_ids, kv.device),
                on_device(batch.anchor_positions, kv.device),
                on_device(batch.slots, kv.device),
            ),
            batch.num_drafts,
            lambda number: kv.plan_step(batch.slots, lengths + number),
            sampler,
        )
        return proposals(batch, drawn.packed(), sampler.laws)


def proposals(
    batch: DraftBatch,
    packed: Tensor,
    laws: Callable[[DraftTask, int], Tensor | None] = lambda task, row: None,
) -> list[Proposal]:
    """packed: `Drawn.packed` of the batch, on any device: one copy. laws: see DraftSampler.laws."""
    most = batch.num_drafts
    return [
        Proposal(
            tuple(map(int, row[: min(most, task.num_wanted)])),
            tuple(row[most : most + task.num_wanted]),
            laws=laws(task, place),
        )
        for place, (task, row) in enumerate(zip(batch.tasks, packed.tolist(), strict=True))
    ]
