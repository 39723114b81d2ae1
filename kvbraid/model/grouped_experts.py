"""A rank's experts on a GPU: two products for all of them, the routing never leaves the device.

T tokens, k experts chosen each, E experts of this rank, I their width.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows of a tile: the matrices are read once for so many. More where experts have many rows.
_BLOCK_ROWS = (16, 32, 64)
_BLOCK_OUT = 64
_BLOCK_BYTES = 256
# Programs that share the rows of an expert, at most.
_MOST_PARTS = 16


def can_group_experts(device: torch.device) -> bool:
    """Whether GroupedExperts can serve on this device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


class GroupedExperts:
    """Implements `moe.Experts` without a wait of the host, so that it can be captured in graphs."""

    def __init__(self, gate_up: Tensor, down: Tensor, shard: range) -> None:
        """gate_up: [E, 2 * I, hidden], gate first; down: [E, hidden, I]; of the experts whose
        global ids are in `shard`."""
        self._gate_up = gate_up
        self._down = down
        self._shard = shard
        self._ids = torch.arange(shard.start, shard.stop + 1, device=gate_up.device)

    def add(self, out: Tensor, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """See Experts."""
        if not self._shard or not len(x):
            return out
        num_chosen, weights = experts.shape[1], weights.flatten()
        by_expert, order = experts.flatten().sort(stable=True)
        bounds = torch.searchsorted(by_expert, self._ids, out_int32=True)
        gate_up = x.new_empty(len(order), self._gate_up.shape[1])
        self._multiply(x.contiguous(), self._gate_up, gate_up, order, bounds, weights, num_chosen)
        gate, up = gate_up.chunk(2, dim=1)
        inner = F.silu(gate).mul_(up)
        # Pairs of other ranks' experts are not written.
        parts = x.new_zeros(len(order), x.shape[1], dtype=torch.float32)
        self._multiply(inner, self._down, parts, order, bounds, weights, 0)
        return out.add_(parts.view(len(x), num_chosen, -1).sum(1))

    def _multiply(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        order: Tensor,
        bounds: Tensor,
        scale: Tensor,
        pairs_per_row: int,
    ) -> None:
        from kvbraid.model import grouped_product_kernel

        num_experts, num_out, num_in = weight.shape
        rows = -(-len(order) // num_experts)
        block_rows = next((n for n in _BLOCK_ROWS if n >= rows), _BLOCK_ROWS[-1])
        parts = min(_MOST_PARTS, -(-rows // block_rows))
        grouped_product_kernel.grouped_product[(-(-num_out // _BLOCK_OUT), num_experts, parts)](
            x,
            weight,
            out,
            order,
            bounds,
            scale,
            IN=num_in,
            OUT=num_out,
            PAIRS_PER_ROW=pairs_per_row,
            BLOCK_ROWS=block_rows,
            BLOCK_OUT=_BLOCK_OUT,
            BLOCK_IN=_BLOCK_BYTES // x.element_size(),
            num_warps=4,
        )
