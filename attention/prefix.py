"""The committed prefix of an extend step, brought from every stripe into position order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from attention.interface import ExtendBatch, Group
from attention.layout import StripeLayout
from attention.rows import contiguous_start, row_ids
from attention.stored_rows import StoredPool, StoredRows


class PrefixRows:
    """Planned once a step; `gather` runs once a layer.

    Each rank sends its rows of every sequence, padded to the count of DCP rank 0 (which has the
    most), so that one all-gather of equal shapes carries everything.
    """

    def __init__(
        self, batch: ExtendBatch, stripe: StripeLayout, group: Group, device: torch.device
    ) -> None:
        self._group = group
        self._num_rows = sum(batch.prefix_lens)
        self._run: slice | None = None
        if self._num_rows == 0:
            return
        page_table = batch.page_table.cpu()
        if stripe.dcp_size == 1:
            self._run = _single_run(batch.prefix_lens, page_table, stripe.page_size)
        first = replace(stripe, dcp_rank=0)
        sent = [first.local_length(length) for length in batch.prefix_lens]
        local = [stripe.local_length(length) for length in batch.prefix_lens]
        self._send_ids = _padded_row_ids(page_table, local, sent, stripe.page_size).to(device)
        self._order = _position_order(batch.prefix_lens, sent, stripe).to(device)

    @property
    def is_empty(self) -> bool:
        """No sequence has a prefix: nothing is sent, on any rank."""
        return self._num_rows == 0

    def gather(self, *pools: StoredPool, dtype: torch.dtype) -> list[Tensor]:
        """True values of the rows of all prefixes in position order, sequences concatenated.

        pools: this rank's rows of one layer, each [N*P, ...], all of one shape, dtype and kind of
        scale. Returns one [S, ...] in dtype a pool; what travels is what is stored. A collective
        unless c = 1; must not be called when `is_empty`.
        """
        return [rows.values(dtype) for rows in self._gather(pools)]

    def _gather(self, pools: Sequence[StoredPool]) -> list[StoredRows]:
        if self._run is not None:
            start, stop = self._run.start, self._run.stop
            return [pool.narrow(start, stop - start) for pool in pools]
        if self._group.size == 1:
            return [pool.select(self._send_ids) for pool in pools]
        rows = pools[0].rows
        send = rows.new_empty(len(pools), len(self._send_ids), *rows.shape[1:])
        sent = [
            pool.select(self._send_ids, out=part) for part, pool in zip(send, pools, strict=True)
        ]
        # Not all collectives and no index operation know 8-bit floats.
        as_bytes = send.view(torch.uint8) if send.dtype.itemsize == 1 else send
        received = [part.view(rows.dtype) for part in self._from_all_ranks(as_bytes)]
        scales = [part.row_scales() for part in sent]
        present = [scale for scale in scales if scale is not None]
        if not present:
            return [StoredRows(part) for part in received]
        received_scales = self._from_all_ranks(torch.stack(present))
        return [StoredRows(*part) for part in zip(received, received_scales, strict=True)]

    def _from_all_ranks(self, send: Tensor) -> list[Tensor]:
        """send [pools, sent rows, ...] of every rank -> [S, ...] in position order of each pool."""
        received = self._group.all_gather(send)
        return [received[:, i].flatten(0, 1).index_select(0, self._order) for i in range(len(send))]


def _single_run(prefix_lens: list[int], page_table: Tensor, page_size: int) -> slice | None:
    """The pool rows of all prefixes if they are one contiguous run of one sequence."""
    present = [i for i, length in enumerate(prefix_lens) if length]
    if len(present) != 1:
        return None
    length = prefix_lens[present[0]]
    start = contiguous_start(page_table[present[0]], length, page_size)
    return None if start is None else slice(start, start + length)


def _padded_row_ids(
    page_table: Tensor, local: list[int], sent: list[int], page_size: int
) -> Tensor:
    """Pool rows to send: each sequence's local rows, padded to `sent` with rows nobody keeps."""
    if max(local) == 0:
        return torch.zeros(sum(sent), dtype=torch.int64)
    ids = row_ids(page_table, local, max(sent), page_size)
    is_sent = torch.arange(max(sent))[None, :] < torch.tensor(sent)[:, None]
    return ids[is_sent]


def _position_order(prefix_lens: list[int], sent: list[int], stripe: StripeLayout) -> Tensor:
    """For each position of each sequence, its index in the gathered [c * sum(sent)] rows."""
    starts = list(accumulate(sent, initial=0))
    return torch.cat(
        [
            stripe.owner(positions) * starts[-1] + start + stripe.row(positions)
            for start, positions in zip(
                starts[:-1], (torch.arange(length) for length in prefix_lens), strict=True
            )
        ]
    )
