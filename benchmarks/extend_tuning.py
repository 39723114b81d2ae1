"""Times launch shapes of the triton extend kernel: where triton_extend_tuning's tables come from.

python -m benchmarks.extend_tuning --heads "gqa 32/8 heads of 128"

Prints microseconds of each shape and batch, the fastest first.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product

import torch
from triton.runtime.errors import OutOfResources

from attention.backends.triton_extend import TritonExtendKernel
from attention.backends.triton_extend_tuning import ExtendShape
from benchmarks.extend import BATCHES, DEVICE, HEADS, Batch, Heads, Problem, replay_us

# (block_rows, num_warps), block_keys, num_stages
_ROWS = ((128, 8), (128, 4), (64, 4))
_KEYS = (32, 64, 128)
_STAGES = (2, 3, 4)
# Shared memory of an SM of Hopper that a program can have.
_MAX_BYTES = 227 << 10


def shapes(heads: Heads) -> list[ExtendShape]:
    """What fits an SM: bf16 rows of q and stages of keys and values."""
    width = heads.key_width + heads.rope
    found = []
    for (rows, warps), keys, stages in product(_ROWS, _KEYS, _STAGES):
        num_bytes = 2 * (rows * width + stages * keys * (width + heads.value_width))
        if num_bytes > _MAX_BYTES:
            continue
        together = max(1, min(_MAX_BYTES // num_bytes, 4 if warps == 4 else 2))
        for tma in (True, False):
            found.append(
                ExtendShape(
                    block_rows=rows,
                    block_keys=keys,
                    num_warps=warps,
                    num_stages=stages,
                    tma=tma,
                    programs_per_sm=together,
                )
            )
    return found


def time_us(heads: Heads, batch: Batch, shape: ExtendShape, repeats: int) -> float:
    """Infinite where the shape needs more than an SM has."""
    problem = Problem(heads, batch)
    kernel = TritonExtendKernel(
        batch.rows,
        kv_index=heads.kv_index,
        scale=heads.scale,
        deterministic=False,
        device=DEVICE,
        shape_of=lambda **_: shape,
    )
    try:
        return replay_us({"": problem.call(kernel)}, repeats)[""]
    except OutOfResources:
        return float("inf")


def main() -> None:
    """Print a table for each batch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", action="append", choices=[x.name for x in HEADS])
    parser.add_argument("--batch", action="append", choices=[x.name for x in BATCHES])
    parser.add_argument("--rows", type=int, action="append", help="only these block_rows")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    for heads in HEADS:
        if options.heads and heads.name not in options.heads:
            continue
        candidates = [x for x in shapes(heads) if not options.rows or x.block_rows in options.rows]
        for batch in BATCHES:
            if options.batch and batch.name not in options.batch:
                continue
            times = [
                (time_us(heads, batch, shape, options.repeats), i)
                for i, shape in enumerate(candidates)
            ]
            print(f"{heads.name}, {batch.name}")
            for time, i in sorted(times):
                print(f"  {time:9.1f}  {candidates[i]}", flush=True)


if __name__ == "__main__":
    main()
