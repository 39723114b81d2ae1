"""Buffers that plans of decode steps are written into, so that a captured graph can be replayed."""

from __future__ import annotations

from dataclasses import dataclass

from attention.backends.base import ReservedDecode
from attention.interface import DecodeBatch
from attention.layout import StripeLayout
from attention.rows import WINDOW_MASKS, DecodeBounds


@dataclass(frozen=True, slots=True, eq=False)
class DecodeBuffers:
    """Made by `DcpAttention.decode_buffers` and written by `DcpAttention.plan_decode(into=...)`.

    One set of buffers holds one step's plan. A graph captured with it computes, when replayed, the
    step that was planned into it last. Several sets may be used in turn.
    """

    batch_size: int
    max_len: int
    window: int
    window_mask: str
    stripe: StripeLayout
    reserved: ReservedDecode
    max_growth: int = 0

    def grow(self) -> None:
        """Make the plan that of the next forward: every sequence that has rows has one more, in
        pages that its row of the page table already names. Launched like any kernel, so a graph
        repeats it; at most max_growth times a plan. Attention may not be the next thing launched:
        it reads its plan before the kernel just before it has ended."""
        self.reserved.grow()

    def check(self, batch: DecodeBatch, stripe: StripeLayout) -> None:
        """Raises ValueError unless the batch is within these bounds and the buffers are of the rank
        with this stripe."""
        if stripe != self.stripe:
            raise ValueError(f"the buffers are of {self.stripe}, not of {stripe}")
        if len(batch.seq_lens) != self.batch_size:
            raise ValueError(
                f"the batch has {len(batch.seq_lens)} rows, the buffers {self.batch_size}: pad "
                f"with rows of length 0"
            )
        other_mask = self.window > 1 and batch.window_mask != self.window_mask
        if batch.window != self.window or other_mask:
            raise ValueError(
                f"window {batch.window} {batch.window_mask!r} is not that of the buffers, "
                f"{self.window} {self.window_mask!r}"
            )
        longest = max(batch.seq_lens.tolist(), default=0)
        if longest > self.max_len + self.window:
            raise ValueError(
                f"length {longest} is outside [0, {self.max_len + self.window}], the buffers' "
                f"max_len {self.max_len} and window {self.window}"
            )
        capacity = batch.page_table.shape[1] * stripe.logical_page_size
        if self.max_growth and longest and longest + self.max_growth > capacity:
            raise ValueError(
                f"length {longest} may grow by {self.max_growth}, above the page table's {capacity}"
            )


def decode_bounds(
    stripe: StripeLayout,
    *,
    batch_size: int,
    max_len: int,
    window: int,
    window_mask: str,
    max_growth: int = 0,
) -> DecodeBounds:
    """Static bounds of a rank: n_0(max_len + window + max_growth) rows of each sequence, the same
    on every rank.

    Raises ValueError for sizes below 1, an unknown mask, and growth of stripes or below 0.
    """
    for name, size in (("batch_size", batch_size), ("max_len", max_len), ("window", window)):
        if size < 1:
            raise ValueError(f"{name} {size} must be >= 1")
    if window_mask not in WINDOW_MASKS:
        raise ValueError(f"window_mask {window_mask!r} must be one of {WINDOW_MASKS}")
    if max_growth < 0 or (max_growth and stripe.dcp_size > 1):
        raise ValueError(
            f"max_growth {max_growth} must be 0, or above it on one rank; the stripe is of "
            f"{stripe.dcp_size}"
        )
    return DecodeBounds(
        batch_size=batch_size,
        max_rows=stripe.max_local_length(max_len + window + max_growth),
        page_size=stripe.page_size,
        window=window,
        window_mask=window_mask,
        has_window=window > 1 and stripe.dcp_rank == 0,
        max_growth=max_growth,
    )
