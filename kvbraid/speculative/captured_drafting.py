"""Draft steps as captured graphs: a step is a few uploads, a replay for the rows that it brings and
one for all drafts, and one copy back.

A graph serves a padded number of rows, or a padded number of sequences with an exact number of
drafts, greedy or not: a draft more costs a forward or a product with the vocabulary, and noise
several passes over it. It is captured when it is first needed; a worker drafts in all sizes that
are usual before it serves. Padding has the spare slot, and its KV goes to the sink. Rows of long
prompts come in pieces: a product of a size that was never computed loads its kernel first, which
takes as long as dozens of steps. Only drafts whose law is asked for run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvbraid.model.graph_capture import GraphCapture, graph_size
from kvbraid.speculative.captured_choice import GreedyChoice, MixedChoice, SamplingColumns
from kvbraid.speculative.captured_context import MOST_CAPTURED_ROWS, SizedContext
from kvbraid.speculative.context_rows import ContextRows
from kvbraid.speculative.draft_batch import DraftBatch
from kvbraid.speculative.draft_compute import Anchors, DraftCompute
from kvbraid.speculative.draft_forward import EagerDraftForward, proposals
from kvbraid.speculative.draft_kv import DraftKv
from kvbraid.speculative.draft_session import Admitted
from kvbraid.speculative.proposal import Proposal
from kvbraid.speculative.reserved_step import ReservedStep

_ANCHOR, _POSITION, _SLOT, _KEY, _TEMPERATURE = range(5)
_NUM_COLUMNS = 5


class CapturedDraftForward:
    """Implements `DraftForward` with graphs."""

    def __init__(
        self, compute: DraftCompute, kv: DraftKv, graphs: GraphCapture, max_len: int
    ) -> None:
        """max_len: see DraftGraphs. `kv`'s attention must be one whose decode can be captured."""
        self._compute = compute
        self._kv = kv
        self._capture = graphs
        self._max_len = min(max_len, kv.num_free_pages * kv.page_size)
        self._eager = EagerDraftForward(compute, kv)
        self._max_sequences = kv.spare_slot
        max_drafts = compute.config.max_draft_tokens
        shape = (MOST_CAPTURED_ROWS, compute.config.fused_width)
        self._rows = torch.zeros(shape, dtype=compute.dtype, device=kv.device)
        # Ids and confidences, of every graph.
        self._outputs = torch.zeros(
            2 * max_drafts * self._max_sequences, dtype=torch.float64, device=kv.device
        )
        self._contexts: dict[int, SizedContext] = {}
        self._drafts: dict[int, _SizedDrafts] = {}
        # The largest first: the smaller ones then share its workspace.
        self._sized(self._max_sequences)

    def ingest(self, admitted: Sequence[Admitted]) -> None:
        """See DraftForward."""
        context = ContextRows.of(admitted, self._kv.spare_slot)
        if context is None:
            return
        for piece in context.pieces(MOST_CAPTURED_ROWS):
            self._sized_context(graph_size(len(piece), MOST_CAPTURED_ROWS)).run(piece)

    def draft(self, drafting: Sequence[Admitted]) -> list[Proposal]:
        """See DraftForward."""
        samplings = [item.task.sampling for item in drafting]
        if any(sampling.wants_law and sampling.temperature > 0 for sampling in samplings):
            return self._eager.draft(drafting)
        batch = DraftBatch.of(drafting, self._compute.config.max_draft_tokens)
        sized = self._sized(graph_size(len(batch), self._max_sequences))
        return proposals(batch, sized.run(batch, self._capture))

    def _sized_context(self, num_rows: int) -> SizedContext:
        sized = self._contexts.get(num_rows)
        if sized is None:
            sized = SizedContext(self._compute, self._kv, self._rows[:num_rows], self._capture)
            self._contexts[num_rows] = sized
        return sized

    def _sized(self, batch_size: int) -> _SizedDrafts:
        sized = self._drafts.get(batch_size)
        if sized is None:
            sized = _SizedDrafts(self._compute, self._kv, batch_size, self._max_len, self._outputs)
            self._drafts[batch_size] = sized
        return sized


class _Graph(NamedTuple):
    """replay: computes. packed: `Drawn.packed` of the whole batch, written by it."""

    replay: Callable[[], None]
    packed: Tensor


class _SizedDrafts:
    """What is written before a replay for one batch size, and its graphs."""

    def __init__(
        self,
        compute: DraftCompute,
        kv: DraftKv,
        batch_size: int,
        max_len: int,
        outputs: Tensor,
    ) -> None:
        """outputs: of all sizes, float64, flat."""
        self._compute = compute
        self._kv = kv
        self._outputs = outputs
        self._columns = torch.zeros(_NUM_COLUMNS, batch_size, dtype=torch.int64, device=kv.device)
        self._columns[_SLOT] = kv.spare_slot
        num_forwards = compute.num_forwards(compute.config.max_draft_tokens)
        self._step = ReservedStep(kv, batch_size, num_forwards, max_len)
        self._graphs: dict[tuple[int, bool], _Graph] = {}

    def run(self, batch: DraftBatch, capture: GraphCapture) -> Tensor:
        """`Drawn.packed` of the batch's sequences."""
        is_sampled = any(task.sampling.temperature > 0 for task in batch.tasks)
        graph = self._graphs.get((batch.num_drafts, is_sampled))
        if graph is None:
            graph = self._captured(batch.num_drafts, is_sampled, capture)
            self._graphs[batch.num_drafts, is_sampled] = graph
        self._write(batch)
        self._step.fill(batch.slots, self._compute.first_lengths(batch.num_rows))
        graph.replay()
        return graph.packed[: len(batch)]

    def _captured(self, num_drafts: int, is_sampled: bool, capture: GraphCapture) -> _Graph:
        """Over padding only: no sequence's KV is touched."""
        self._step.fill_padding()
        columns = self._columns
        anchors = Anchors(columns[_ANCHOR], columns[_POSITION], columns[_SLOT])
        choice: GreedyChoice | MixedChoice = GreedyChoice()
        if is_sampled:
            temperatures = columns[_TEMPERATURE].view(torch.float64)
            choice = MixedChoice(
                SamplingColumns(columns[_KEY], columns[_POSITION], temperatures),
                self._compute.vocabulary,
            )
        packed: list[Tensor] = []

        def compute() -> None:
            drawn = self._compute.draft(anchors, num_drafts, self._step.forward, choice)
            found = drawn.packed()
            packed[:] = [self._outputs[: found.numel()].view(found.shape).copy_(found)]

        return _Graph(capture.capture(compute), packed[0])

    def _write(self, batch: DraftBatch) -> None:
        # Pinned memory of torch's host allocator is not given out again before the copy is done.
        staging = torch.zeros(
            self._columns.shape, dtype=torch.int64, pin_memory=self._kv.device.type == "cuda"
        )
        columns, num_sequences = staging.numpy(), len(batch)
        columns[_SLOT] = self._kv.spare_slot
        columns[_ANCHOR, :num_sequences] = batch.anchor_ids
        columns[_POSITION, :num_sequences] = batch.anchor_positions
        columns[_SLOT, :num_sequences] = batch.slots
        columns[_KEY, :num_sequences] = [task.sampling.signed_key for task in batch.tasks]
        columns[_TEMPERATURE].view(np.float64)[:num_sequences] = [
            task.sampling.temperature for task in batch.tasks
        ]
        self._columns.copy_(staging, non_blocking=True)
