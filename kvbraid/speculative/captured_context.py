"""The graph that ingests a padded number of rows, and what is written before each replay."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvbraid.kv.slots import LogicalSlots
from kvbraid.model.graph_capture import GraphCapture
from kvbraid.speculative.context_rows import ContextRows
from kvbraid.speculative.draft_compute import Context, DraftCompute
from kvbraid.speculative.draft_kv import DraftKv

# More rows are a prompt's and come in pieces, whose launches are few beside their work.
MOST_CAPTURED_ROWS = 1024

_TOKEN, _POSITION, _KEPT_SLOT = range(3)
_NUM_COLUMNS = 3


class SizedContext:
    """Padding rows are those of an earlier step: they go to the sink and are kept for nobody."""

    def __init__(
        self, compute: DraftCompute, kv: DraftKv, rows: Tensor, graphs: GraphCapture
    ) -> None:
        """rows: [T, d], static."""
        self._kv = kv
        self._rows = rows
        num_rows = len(rows)
        self._columns = torch.zeros(_NUM_COLUMNS, num_rows, dtype=torch.int64, device=kv.device)
        self._columns[_KEPT_SLOT] = kv.spare_slot
        self._plan = kv.pool.write_plan(LogicalSlots(np.zeros(num_rows, dtype=np.int64)))
        columns = self._columns
        context = Context(
            rows, columns[_TOKEN], columns[_POSITION], columns[_KEPT_SLOT], self._plan
        )
        self._replay = graphs.capture(lambda: compute.ingest(context))

    def run(self, context: ContextRows) -> None:
        """Ingest at most as many rows as there are places."""
        self._write_rows(context.rows)
        self._write_columns(context)
        self._kv.write_plan(context.slots, context.indices, into=self._plan)
        self._replay()

    def _write_rows(self, rows: Tensor) -> None:
        places = self._rows[: len(rows)]
        if rows.device != places.device:
            # Pinned memory of torch's host allocator is not given out again before the copy is
            # done.
            staging = torch.empty(places.shape, dtype=places.dtype, pin_memory=places.is_cuda)
            rows = staging.copy_(rows)
        places.copy_(rows, non_blocking=True)

    def _write_columns(self, context: ContextRows) -> None:
        staging = torch.zeros(
            self._columns.shape, dtype=torch.int64, pin_memory=self._columns.is_cuda
        )
        columns, num_rows = staging.numpy(), len(context)
        columns[_KEPT_SLOT] = self._kv.spare_slot
        columns[_TOKEN, :num_rows] = context.next_token_ids
        columns[_POSITION, :num_rows] = context.positions
        columns[_KEPT_SLOT, :num_rows] = context.kept_slots
        self._columns.copy_(staging, non_blocking=True)
