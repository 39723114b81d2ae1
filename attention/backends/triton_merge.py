"""The merge of split results: its launch, and the tile that fits their number.

What its programs cost beside memory is barriers and tiles in shared memory, which a single warp has
not, and their number. On an H200, 4096 rows of two slots (64 sequences, 64 heads of 512 columns in
16 bits) take 22.6 us with four warps, 6.1 with one, and 11.0 with one and half of the columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from attention.backends import triton_kernels
from attention.backends.decode_launch import launch_options
from attention.interface import AttentionResult, SplitResult

# Bytes of a row of a tile: a line of memory, or several where programs are enough even so.
_LINE_BYTES = 128
_LONG_BYTES = 512
_ENOUGH_PROGRAMS = 512


@dataclass(frozen=True, slots=True)
class MergeTile:
    """Slots and columns that a program of merge_splits has at a time, and its warps."""

    slots: int
    columns: int
    warps: int


def merge_tile(
    max_slots: int, num_slots: int, num_sequences: int, *, num_rows: int, dim: int, itemsize: int
) -> MergeTile:
    """The tile for num_slots partial results of `dim` columns, at most max_slots a sequence.

    num_rows: rows of the result, (token, head). Of many sequences one may have all slots, but most
    have few: these decide. Times in docs/attention.md.
    """
    usual = min(max_slots, max(2, 4 * num_slots // num_sequences))
    slots, columns = _padded(usual), _padded(dim)
    if usual <= 4:
        return MergeTile(slots, min(columns, 512), 1)
    long = min(columns, _LONG_BYTES // itemsize)
    if usual <= 32 and num_rows * -(-dim // long) >= _ENOUGH_PROGRAMS:
        return MergeTile(min(16, slots), long, 1)
    if usual > 128:
        # A second turn of four warps costs 4 us, which one more slot than 128 is not worth.
        return MergeTile(256, min(columns, 32), 4)
    line = min(columns, _LINE_BYTES // itemsize)
    # Three turns of one warp still take less than one of four.
    return MergeTile(min(32, slots), line, 1) if usual <= 96 else MergeTile(128, line, 4)


def merge(splits: SplitResult) -> AttentionResult:
    """Merge the partial results of the sequences that have any, into out and lse in place."""
    out, lse, part_out, part_lse, slot_starts, max_slots = splits
    if max_slots:
        num_tokens, num_heads, dim = out.shape
        tile = merge_tile(
            max_slots,
            len(part_out),
            len(slot_starts) - 1,
            num_rows=num_tokens * num_heads,
            dim=dim,
            itemsize=part_out.element_size(),
        )
        triton_kernels.merge_splits[(num_tokens * num_heads, -(-dim // tile.columns))](
            out,
            lse,
            part_out,
            part_lse,
            slot_starts,
            ROWS=part_out.shape[1],
            DIM=dim,
            BLOCK_SLOTS=tile.slots,
            BLOCK_DIM=tile.columns,
            num_warps=tile.warps,
            **launch_options(out.device),
        )
    return AttentionResult(out, lse)


def _padded(width: int) -> int:
    """The next power of two, at least 2."""
    return max(2, 1 << (width - 1).bit_length())
