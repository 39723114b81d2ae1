"""Packs two rows of pieces of 2^31 elements in Triton's interpreter and prints what is where.

A program of its own because TRITON_INTERPRET must be set before triton is imported. The wire is a
mapping of which no more is touched than those rows.
"""

from __future__ import annotations

import json
import mmap
import sys

import torch

from attention.exchanges import piece_kernels

MAP_NORESERVE = 0x4000
NUM_TOKENS = 1 << 29
# Of each of two ranks: a head of two columns and its lse, in elements of 16 bits.
ROW, LSE = 2, 2
PIECE = NUM_TOKENS * (ROW + LSE)


def main() -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    wire = torch.frombuffer(mmap.mmap(-1, 2 * PIECE * 2, flags), dtype=torch.bfloat16)
    lses = wire.view(torch.float32)
    piece_kernels.pack_pieces[(1,)](
        torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], dtype=torch.bfloat16),
        torch.tensor([[0.5, 0.25]]),
        wire,
        lses,
        NUM_TOKENS,
        HEAD_STARTS=(0, 1, 2),
        SIZE=2,
        DIM=ROW,
        ROW_ELEMENTS=ROW,
        LSE_ELEMENTS=LSE,
        ALIGNMENT=8,
        BLOCK_ROWS=2,
        BLOCK_COLS=16,
    )
    pieces = [
        {
            "row": wire[start : start + ROW].tolist(),
            "lse": float(lses[(start + NUM_TOKENS * ROW) // LSE]),
        }
        for start in (0, PIECE)
    ]
    json.dump(pieces, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
