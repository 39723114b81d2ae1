"""The committed prefix on one rank as vendor kernels want it: no empty sequences, clean tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.rows import DecodeRows, row_ids


@dataclass(frozen=True, slots=True)
class LivePrefix:
    """The sequences that have keys in this rank's pool, in batch order.

    Vendor kernels disagree on what a sequence of length 0 gives, and some hang on it, so they
    never see one. lengths are rank-local and >= 1.

    sequences: int64 [n] indices into the batch on the device, None where that is all of it.
    page_table: int32 CPU [n, pages of the longest]; places past a sequence's pages are 0, the
        reserved page, whatever the batch's table held there: some kernels prefetch them.
    """

    sequences: Tensor | None
    lengths: tuple[int, ...]
    page_table: Tensor
    page_size: int

    @property
    def num_pages(self) -> list[int]:
        """Pages of each sequence."""
        return [-(-length // self.page_size) for length in self.lengths]

    def lengths_on(self, device: torch.device) -> Tensor:
        """int32 [n]."""
        return torch.tensor(self.lengths, dtype=torch.int32).to(device)

    def padded_table(self, multiple: int, device: torch.device) -> Tensor:
        """int32 [n, pages rounded up to `multiple`], padded with the reserved page 0."""
        missing = -self.page_table.shape[1] % multiple
        return torch.nn.functional.pad(self.page_table, (0, missing)).contiguous().to(device)

    def page_indices(self) -> Tensor:
        """int32 CPU: the sequences' pages, concatenated."""
        rows = zip(self.page_table, self.num_pages, strict=True)
        return torch.cat([row[:pages] for row, pages in rows])

    def page_starts(self) -> Tensor:
        """int32 CPU [n + 1]: where each sequence's pages start in `page_indices`."""
        return _running_total(self.num_pages)

    def last_page_lengths(self) -> Tensor:
        """int32 CPU [n]: tokens in each sequence's last page, 1 to page_size."""
        lasts = [(length - 1) % self.page_size + 1 for length in self.lengths]
        return torch.tensor(lasts, dtype=torch.int32)

    def token_rows(self, device: torch.device) -> Tensor:
        """int32 [n, longest length]: pool row of each token; places past the end repeat the last.

        For kernels whose page is one token. Raises OverflowError for pools beyond int32 rows.
        """
        rows = row_ids(self.page_table, list(self.lengths), max(self.lengths), self.page_size)
        if int(rows.max()) > torch.iinfo(torch.int32).max:
            raise OverflowError(f"pool row {int(rows.max())} does not fit into 32 bits")
        return rows.to(torch.int32).to(device)


def live_prefix(rows: DecodeRows, device: torch.device) -> LivePrefix:
    """The sequences of `rows` whose committed part on this rank is not empty."""
    members = [b for b, length in enumerate(rows.committed_lens) if length > 0]
    lengths = tuple(rows.committed_lens[b] for b in members)
    num_pages = torch.tensor(
        [-(-length // rows.page_size) for length in lengths], dtype=torch.int64
    )
    width = int(num_pages.max()) if members else 0
    table = rows.page_table[members, :width].to(torch.int32)
    table = table.masked_fill(torch.arange(width)[None, :] >= num_pages[:, None], 0)
    is_whole_batch = len(members) == len(rows.committed_lens)
    sequences = None if is_whole_batch else torch.tensor(members, dtype=torch.int64).to(device)
    return LivePrefix(sequences, lengths, table, rows.page_size)


def _running_total(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
