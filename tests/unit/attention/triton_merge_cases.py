"""Merges random split results in Triton's interpreter and prints the errors and tiles as JSON.

A program of its own because TRITON_INTERPRET must be set before triton is imported. Partial results
that no sequence has, and out and lse of sequences that have some, are NaN.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch

from attention.backends.triton_merge import merge, merge_tile
from attention.interface import SplitResult


@dataclass(frozen=True)
class Case:
    slots: tuple[int, ...]  # of each sequence
    num_rows: int  # of a sequence
    dim: int
    dtype: str = "float32"


CASES = (
    Case((2, 0, 3), 5, 512, "float16"),
    Case((2,) * 12 + (25,), 2, 72),
    Case((18, 5), 270, 256, "float16"),
    Case((17, 0, 9), 3, 512),
    Case((66,), 2, 512, "float16"),
    Case((100,), 2, 512, "float16"),
    Case((129,), 2, 72),
    Case((300, 2), 2, 64, "float16"),
)


def run(case: Case) -> dict[str, object]:
    """The largest error of a row, relative, and of an lse; and the tile."""
    dtype = getattr(torch, case.dtype)
    starts = [0]
    for count in case.slots:
        starts.append(starts[-1] + count)
    parts = torch.randn(starts[-1] + 3, case.num_rows, case.dim)
    parts[starts[-1] :] = torch.nan
    lses = 3 * torch.randn(parts.shape[:2])
    parts = parts.to(dtype)
    out = torch.full((len(case.slots) * case.num_rows, 1, case.dim), torch.nan)
    lse = torch.full((len(case.slots) * case.num_rows, 1), torch.nan)
    done = [b for b, count in enumerate(case.slots) if count == 0]
    for b in done:
        out[b * case.num_rows : (b + 1) * case.num_rows] = b
        lse[b * case.num_rows : (b + 1) * case.num_rows] = b
    splits = SplitResult(out, lse, parts, lses, torch.tensor(starts).int(), max(case.slots))
    got = merge(splits)
    error = lse_error = 0.0
    for b, (first, end) in enumerate(pairwise(starts)):
        rows = slice(b * case.num_rows, (b + 1) * case.num_rows)
        want, want_lse = torch.full((case.num_rows, case.dim), float(b)), torch.tensor(float(b))
        if end > first:
            weights = lses[first:end].double().softmax(0)[..., None]
            want = (parts[first:end].double() * weights).sum(0)
            want_lse = lses[first:end].double().logsumexp(0)
        difference = got.out[rows, 0] - want
        if end > first:
            difference = difference.norm(dim=-1) / want.norm(dim=-1)
        error = max(error, worst(difference))
        lse_error = max(lse_error, worst(got.lse[rows, 0] - want_lse))
    tile = merge_tile(
        max(case.slots),
        len(parts),
        len(case.slots),
        num_rows=len(out),
        dim=case.dim,
        itemsize=dtype.itemsize,
    )
    return {**asdict(case), "error": error, "lse_error": lse_error, "tile": asdict(tile)}


def worst(errors: torch.Tensor) -> float:
    """The largest magnitude; infinite if any is NaN."""
    return float(errors.abs().nan_to_num(nan=torch.inf).max())


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.stdout.write(json.dumps([run(case) for case in CASES]) + "\n")
