"""Run by tools.triton_interpreter: experts in two launches against one product after the other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attention.layout import HeadLayout
from kvbraid.model import moe
from kvbraid.model.grouped_experts import GroupedExperts
from kvbraid.model.layers import GatedMLP, Projection
from kvbraid.model.loader import open_checkpoint
from kvbraid.model.moe import ListedExperts
from kvbraid.model.parallel import ParallelContext
from kvbraid.model.weight_reader import WeightReader

TINY_MLA = Path(__file__).parents[2] / "assets" / "tiny-mla"

# tokens, chosen, experts, of this rank, hidden, width, dtype
CASES = (
    (1, 2, 8, range(8), 48, 24, torch.float32),
    (5, 2, 8, range(8), 130, 70, torch.float32),
    (5, 2, 8, range(2, 5), 48, 24, torch.float32),
    (9, 3, 4, range(1, 1), 32, 16, torch.float32),
    # Every token chooses the same experts: several tiles of rows, and experts without any.
    (150, 2, 64, range(60), 32, 16, torch.float32),
    (300, 1, 3, range(3), 32, 16, torch.float32),
    (6, 2, 4, range(4), 64, 32, torch.float16),
)


class _Member(NamedTuple):
    """A rank whose collectives are not called."""

    rank: int
    size: int


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(*shape) / shape[-1] ** 0.5).to(dtype)


def listed(gate_up: Tensor, down: Tensor, shard: range) -> ListedExperts:
    size = down.shape[2]
    return ListedExperts(
        [
            GatedMLP(Projection([a]), Projection([b]), size)
            for a, b in zip(gate_up, down, strict=True)
        ],
        shard,
    )


def loaded(rank: int, tp_size: int) -> float:
    """Error of an expert layer of tiny-mla as a GPU would load it, against the one of a CPU."""
    config, source = open_checkpoint(TINY_MLA)
    group = _Member(rank, tp_size)
    parallel = ParallelContext(HeadLayout(8, 1, tp_size, rank, 1), group)
    x = torch.randn(5, config.hidden_size)
    results = []
    for can_group in (True, False):
        moe.can_group_experts = lambda device, can_group=can_group: can_group
        reader = WeightReader(source, dtype=torch.float32, device=torch.device("cpu"))
        layer = moe.load_moe(reader, "model.layers.2.mlp", config, parallel)
        results.append(layer.forward(x.clone()))
    made, expected = results
    return float((made - expected).norm() / expected.norm())


def main() -> None:
    torch.manual_seed(7)
    results = [
        {"case": f"loaded by rank {rank} of {size}", "error": loaded(rank, size)}
        for rank, size in ((0, 1), (1, 3))
    ]
    for tokens, chosen, experts, shard, hidden, width, dtype in CASES:
        gate_up = random(len(shard), 2 * width, hidden, dtype=dtype)
        down = random(len(shard), hidden, width, dtype=dtype)
        x, shared = random(tokens, hidden, dtype=dtype), random(tokens, hidden, dtype=dtype)
        scores = torch.rand(tokens, experts)
        if experts == 64:
            scores[:] = scores[0]
        weights, ids = scores.topk(chosen, dim=-1, sorted=False)
        made = GroupedExperts(gate_up, down, shard).add(shared.clone(), x, ids, weights)
        wide = listed(gate_up.float(), down.float(), shard)
        expected = wide.add(shared.float(), x.float(), ids, weights)
        error = (made.float() - expected).norm() / expected.norm()
        results.append({"case": f"{tokens} {shard} {dtype}", "error": float(error)})
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
