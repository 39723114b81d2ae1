"""Attention of a batch of one size that captured graphs read: planned anew for each step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from attention.dcp import DecodePlan
from attention.interface import DecodeBatch
from kvbraid.kv.slots import LogicalSlots
from kvbraid.speculative.draft_kv import WINDOW_MASK, DraftKv, DraftStep, Int64Array

_SINK_SLOT = 0


class ReservedStep:
    """One forward over a batch, or several, each of which has a row more in every sequence.

    All of them are planned by two uploads: the attention's plan grows on the device, and each
    forward writes its own part of the rows. Padding has length 0 and writes to the sink.
    """

    def __init__(self, kv: DraftKv, batch_size: int, num_forwards: int, max_len: int) -> None:
        """max_len: most rows of a sequence before the first forward. Reserve the largest batch
        first: workspaces are then shared."""
        self._kv = kv
        self._batch_size = batch_size
        self._max_growth = num_forwards - 1
        self._buffers = kv.attention.decode_buffers(
            batch_size=batch_size,
            max_len=max_len,
            window=kv.window,
            window_mask=WINDOW_MASK,
            dtype=kv.pool.spec.dtype,
            kv_dtype=kv.pool.spec.dtype,
            device=kv.device,
            max_growth=self._max_growth,
        )
        num_tokens = batch_size * kv.window
        self._sinks = LogicalSlots(np.full(num_forwards * num_tokens, _SINK_SLOT))
        self._writes = kv.pool.write_plan(self._sinks)
        self._parts = kv.pool.write_plan_parts(self._writes, num_tokens)
        self._plan = self._plan_padding()

    def fill_padding(self) -> None:
        """No sequence: what a capture computes touches nobody's rows."""
        self._kv.pool.write_plan(self._sinks, into=self._writes)
        self._plan_padding()

    def fill(self, slots: Int64Array, lengths: Int64Array) -> None:
        """The forwards that come run the last `window` of lengths[b] rows of the sequence in
        slots[b], the next one of lengths[b] + 1, and so on; at most batch_size sequences."""
        kv, window, num_sequences = self._kv, self._kv.window, len(slots)
        places = np.arange(window) - window + np.arange(len(self._parts))[:, None]
        indices = places[:, None, :] + lengths[:, None]
        logical = kv.logical_slots(
            np.tile(np.repeat(slots, window), len(self._parts)), indices.ravel()
        )
        padded = np.full((len(self._parts), self._batch_size * window), _SINK_SLOT)
        padded[:, : num_sequences * window] = logical.array.reshape(len(self._parts), -1)
        kv.pool.write_plan(LogicalSlots(padded.ravel()), into=self._writes)
        batch = kv.decode_batch(slots, lengths, self._max_growth)
        kv.attention.plan_decode(self._padded(batch), kv.device, into=self._buffers)

    def forward(self, number: int) -> DraftStep:
        """The 0-based forward `number`, in order; called while the graph is captured."""
        if number:
            self._buffers.grow()
        return DraftStep(self._kv.attention, self._kv.pool, self._parts[number], self._plan)

    def _plan_padding(self) -> DecodePlan:
        nothing = DecodeBatch(
            seq_lens=torch.zeros(self._batch_size, dtype=torch.int32),
            page_table=torch.zeros(self._batch_size, 1, dtype=torch.int32),
            window=self._kv.window,
            window_mask=WINDOW_MASK,
        )
        return self._kv.attention.plan_decode(nothing, self._kv.device, into=self._buffers)

    def _padded(self, batch: DecodeBatch) -> DecodeBatch:
        num_missing = self._batch_size - len(batch.seq_lens)
        if not num_missing:
            return batch
        lens, table = batch.seq_lens, batch.page_table
        return replace(
            batch,
            seq_lens=torch.cat((lens, lens.new_zeros(num_missing))),
            page_table=torch.cat((table, table.new_zeros(num_missing, table.shape[1]))),
        )
