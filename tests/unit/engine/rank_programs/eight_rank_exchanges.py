"""Exchanges among eight processes, on every CPU communicator, against the float64 merge.

Rank 0 spawns the others, as a service does. Each rank prints one JSON object a line: {"kind",
"exchange", "heads", "rank", "shape", "error"}; error is the largest absolute one of its own heads.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import torch

from attention import reference
from attention.exchanges.a2a import A2AExchange
from attention.exchanges.ag_rs import AgRsExchange
from attention.interface import AttentionResult, Group
from attention.layout import shard_range
from kvbraid.engine.communicator import make_groups
from kvbraid.engine.ranks import RankContext, from_environment, spawn_ranks, start_run

SIZE = 8
NUM_TOKENS, WIDTH = 3, 24
# 20 and 9 split unevenly; of 5, three ranks keep none.
HEADS = (20, 9, 5)
NO_KEYS = float("-inf")


def partial_of(rank: int, num_heads: int) -> AttentionResult:
    """What a rank contributes; a third of the rows has no keys, and NaN for values."""
    generator = torch.Generator().manual_seed(100 * num_heads + rank)
    out = torch.randn(NUM_TOKENS, num_heads, WIDTH, generator=generator)
    lse = 4 * torch.randn(NUM_TOKENS, num_heads, generator=generator)
    empty = torch.rand(lse.shape, generator=generator) < 0.3
    return AttentionResult(
        out.masked_fill(empty[..., None], float("nan")), lse.masked_fill(empty, NO_KEYS)
    )


def check(kind: str, group: Group, exchange: A2AExchange | AgRsExchange, num_heads: int) -> None:
    """Prints this rank's line."""
    owned = [shard_range(num_heads, rank, SIZE) for rank in range(SIZE)]
    splits = [len(heads) for heads in owned]
    merged = exchange.combine(partial_of(group.rank, num_heads), splits, group)
    expected = reference.merge([partial_of(rank, num_heads) for rank in range(SIZE)]).out
    mine = expected[:, list(owned[group.rank])]
    error = (merged.double() - mine).abs().nan_to_num(float("inf")).amax() if mine.numel() else 0.0
    entry = {"kind": kind, "exchange": exchange.name, "heads": num_heads, "rank": group.rank}
    entry |= {"shape": list(merged.shape), "error": float(error)}
    os.write(1, (json.dumps(entry) + "\n").encode())


def check_kind(kind: str, context: RankContext) -> None:
    """Every exchange and head count."""
    run = replace(context, run_id=f"{context.run_id}-{kind}")
    group = make_groups(kind, run, tp_size=SIZE, dcp_size=SIZE, timeout_s=60).dcp
    for exchange in (A2AExchange(), AgRsExchange()):
        for num_heads in HEADS:
            check(kind, group, exchange, num_heads)
    group.barrier()


def main() -> None:
    torch.set_num_threads(1)
    context = from_environment()
    ranks = None
    if context is None:
        context = start_run(SIZE)
        ranks = spawn_ranks([sys.executable, *sys.argv], context)
    check_kind("shared_memory", context)
    check_kind("gloo", context)
    torch.distributed.destroy_process_group()
    if ranks is not None:
        codes = ranks.stop(grace_s=30)
        assert codes == (0,) * (SIZE - 1), codes


if __name__ == "__main__":
    main()
