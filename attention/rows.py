"""Where one rank's part of a step's sequences lies in its pool: lengths, page tables, row ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.interface import DecodeBatch, ExtendBatch
from attention.layout import StripeLayout

WINDOW_MASKS = ("causal", "full")


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """What one rank attends to in one decode or verify step.

    committed_lens: tokens of each sequence that this rank reads from its pool. Plain decode counts
        the new token (it is in the pool already), verify stops before the window.
    page_table: int32 CPU [B, max_pages]; row i of a sequence is row i % P of page i // P.
    has_window: whether this rank also attends to the window's in-hand keys. True on DCP rank 0 of
        a verify step only: the window is the same on every rank and must be counted once.
    is_padding: sequences of length 0, whose output is 0.
    """

    committed_lens: tuple[int, ...]
    page_table: Tensor
    page_size: int
    window: int
    window_mask: str
    has_window: bool
    is_padding: tuple[bool, ...]

    @property
    def num_keys(self) -> int:
        """Keys of all sequences in this rank's pool."""
        return sum(self.committed_lens)


@dataclass(frozen=True, slots=True)
class DecodeBounds:
    """What the DecodeRows of all steps that share buffers have in common.

    batch_size: sequences of each, padding included. max_rows: no sequence has more rows in this
    rank's pool. max_growth: rows by which a planned step may grow afterwards; they are counted in
    max_rows. Other fields: as in DecodeRows.
    """

    batch_size: int
    max_rows: int
    page_size: int
    window: int
    window_mask: str
    has_window: bool
    max_growth: int = 0

    @property
    def num_keys(self) -> int:
        """Most keys of all sequences in this rank's pool."""
        return self.batch_size * self.max_rows


def decode_rows(batch: DecodeBatch, stripe: StripeLayout) -> DecodeRows:
    """Work out this rank's part of `batch`.

    Raises ValueError for a length that is negative or inside its own window, an unknown mask, or
    a page table that is too narrow.
    """
    seq_lens = [int(length) for length in batch.seq_lens.tolist()]
    window = batch.window
    if window < 1:
        raise ValueError(f"window {window} must be >= 1")
    if batch.window_mask not in WINDOW_MASKS:
        raise ValueError(f"window_mask {batch.window_mask!r} must be one of {WINDOW_MASKS}")
    for length in seq_lens:
        if length < 0 or 0 < length < window:
            raise ValueError(f"sequence length {length} must be 0 (padding) or >= window {window}")
    is_verify = window > 1
    committed = [max(0, length - window) if is_verify else length for length in seq_lens]
    check_page_table(batch.page_table, committed, stripe)
    return DecodeRows(
        committed_lens=tuple(stripe.local_length(length) for length in committed),
        page_table=batch.page_table.cpu(),
        page_size=stripe.page_size,
        window=window,
        window_mask=batch.window_mask,
        has_window=is_verify and stripe.dcp_rank == 0,
        is_padding=tuple(length == 0 for length in seq_lens),
    )


@dataclass(frozen=True, slots=True)
class ExtendRows:
    """Lengths of one extend step: prefix_lens[i] tokens in the pool, chunk_lens[i] in hand."""

    prefix_lens: tuple[int, ...]
    chunk_lens: tuple[int, ...]


def extend_rows(batch: ExtendBatch, stripe: StripeLayout) -> ExtendRows:
    """Check `batch`. Raises ValueError for negative or unequally many lengths or a narrow table."""
    if len(batch.prefix_lens) != len(batch.chunk_lens):
        raise ValueError(
            f"{len(batch.prefix_lens)} prefix lengths but {len(batch.chunk_lens)} chunk lengths"
        )
    for length in (*batch.prefix_lens, *batch.chunk_lens):
        if length < 0:
            raise ValueError(f"length {length} must be >= 0")
    check_page_table(batch.page_table, batch.prefix_lens, stripe)
    return ExtendRows(tuple(batch.prefix_lens), tuple(batch.chunk_lens))


def check_page_table(page_table: Tensor, lengths: list[int], stripe: StripeLayout) -> None:
    """Raises ValueError unless page_table [B, max_pages] covers these global lengths."""
    if page_table.shape[0] != len(lengths):
        raise ValueError(f"page table has {page_table.shape[0]} rows for {len(lengths)} sequences")
    capacity = page_table.shape[1] * stripe.logical_page_size
    if lengths and max(lengths) > capacity:
        raise ValueError(
            f"length {max(lengths)} is above the page table's {capacity} tokens "
            f"({page_table.shape[1]} pages of {stripe.logical_page_size})"
        )


def row_ids(page_table: Tensor, num_rows: list[int], width: int, page_size: int) -> Tensor:
    """int64 CPU [B, width]: pool row of each sequence's i-th local token.

    Places past num_rows[i] repeat the last row, those of a sequence without rows repeat a row of
    the longest sequence, so that nothing but live rows is ever read. At least one must have rows.
    """
    lengths = torch.tensor(num_rows)
    tables = page_table
    if min(num_rows) == 0:
        longest = int(lengths.argmax())
        tables = torch.where((lengths == 0)[:, None], page_table[longest], page_table)
        lengths = lengths.clamp(min=1)
    index = torch.minimum(torch.arange(width)[None, :], lengths[:, None] - 1)
    pages = tables.gather(1, index // page_size).to(torch.int64)
    return pages * page_size + index % page_size


def rows_of(pages: Tensor) -> Tensor:
    """[N, P, ...] as [N * P, ...] without a copy. Raises RuntimeError if that is impossible."""
    return pages.view(-1, *pages.shape[2:])


def contiguous_start(page_table_row: Tensor, num_rows: int, page_size: int) -> int | None:
    """First pool row if the sequence's rows are one contiguous run, else None."""
    pages = page_table_row[: -(-num_rows // page_size)].to(torch.int64)
    if bool((pages.diff() != 1).any()):
        return None
    return int(pages[0]) * page_size
