"""Workspace of the CuTe DSL MLA kernels, which cut sequences over the multiprocessors."""

from __future__ import annotations

import torch

from attention import accelerator

# Rows of the matrix tile: partial results of fewer heads are as large.
_TILE_HEADS = 128


def split_workspace_bytes(batch_size: int, num_heads: int, rank: int, device: torch.device) -> int:
    """float32 partial outputs and LSEs: batch x split x max(heads, 128) x (rank + 1) x 4.

    A batch is cut so that batch x split stays within the multiprocessors, or not at all.
    """
    pieces = max(batch_size, accelerator.num_multiprocessors(device))
    return pieces * max(num_heads, _TILE_HEADS) * (rank + 1) * 4
