"""Pack, merge and weigh with one Triton launch each, for GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from attention.exchanges.pieces import ALIGNMENT, LSE_BYTES, piece_bytes, row_bytes
from attention.interface import AttentionResult

# Values of a program's tile, and the rows from which a program takes several: fewer rows must
# rather spread over the GPU.
_TILE = 2048
_MANY_ROWS = 1024


class TritonPieces:
    """`Pieces` by our kernels. Triton itself is imported at the first call."""

    def pack(self, partial: AttentionResult, head_splits: Sequence[int]) -> Tensor:
        """See Pieces."""
        from attention.exchanges import piece_kernels

        out, lse = partial
        num_tokens, num_heads, width = out.shape
        num_rows = num_tokens * num_heads
        num_bytes = sum(piece_bytes(num_tokens * n, width, out.dtype) for n in head_splits)
        wire = out.new_empty(num_bytes, dtype=torch.uint8)
        if not num_rows:
            return wire
        block_rows, block_cols = _tile(num_rows, width)
        piece_kernels.pack_pieces[(-(-num_rows // block_rows),)](
            out.contiguous(),
            lse.contiguous(),
            wire.view(out.dtype),
            wire.view(torch.float32),
            num_tokens,
            HEAD_STARTS=head_starts(head_splits),
            SIZE=len(head_splits),
            DIM=width,
            BLOCK_ROWS=block_rows,
            BLOCK_COLS=block_cols,
            **_row_options(width, out.dtype),
        )
        return wire

    def merge(self, received: Tensor, like: Tensor, num_heads: int) -> Tensor:
        """See Pieces."""
        from attention.exchanges import piece_kernels

        num_tokens, _, width = like.shape
        num_rows = num_tokens * num_heads
        merged = like.new_empty(num_tokens, num_heads, width)
        if not num_rows:
            return merged
        block_rows, block_cols = _tile(num_rows, width)
        wire = received.view(-1)
        piece_kernels.merge_pieces[(-(-num_rows // block_rows), -(-width // block_cols))](
            wire.view(like.dtype),
            wire.view(torch.float32),
            merged,
            num_rows,
            SIZE=received.shape[0],
            DIM=width,
            BLOCK_ROWS=block_rows,
            BLOCK_COLS=block_cols,
            **_row_options(width, like.dtype),
        )
        return merged

    def weigh(self, out: Tensor, lses: Tensor, rank: int, head_splits: Sequence[int]) -> Tensor:
        """See Pieces."""
        from attention.exchanges import piece_kernels

        num_tokens, _, width = out.shape
        size, most = len(head_splits), max(head_splits)
        send = out.new_empty(size, num_tokens, most, width, dtype=torch.float32)
        num_rows = num_tokens * most
        if not num_rows:
            return send
        block_rows, block_cols = _tile(size * num_rows, width)
        piece_kernels.weigh_pieces[(-(-num_rows // block_rows), size * -(-width // block_cols))](
            out.contiguous(),
            lses,
            send,
            num_tokens,
            HEAD_STARTS=head_starts(head_splits),
            SIZE=size,
            RANK=rank,
            MOST=most,
            DIM=width,
            BLOCK_ROWS=block_rows,
            BLOCK_COLS=block_cols,
        )
        return send


def head_starts(head_splits: Sequence[int]) -> tuple[int, ...]:
    """First head of each rank, and the number of heads at the end."""
    return tuple(accumulate(head_splits, initial=0))


def _row_options(width: int, dtype: torch.dtype) -> dict[str, int]:
    return {
        "ROW_ELEMENTS": (row_bytes(width, dtype) - LSE_BYTES) // dtype.itemsize,
        "LSE_ELEMENTS": LSE_BYTES // dtype.itemsize,
        "ALIGNMENT": ALIGNMENT // dtype.itemsize,
    }


def _tile(num_rows: int, width: int) -> tuple[int, int]:
    block_cols = min(512, max(16, 1 << (width - 1).bit_length()))
    return (max(1, _TILE // block_cols) if num_rows >= _MANY_ROWS else 1), block_cols
