"""Milliseconds of all matrix products of one decode step on CPU: ours against torch's own.

python -m benchmarks.cpu_products --json benchmarks/results/cpu_products.json

Matrices of SmolLM2-135M in float32, random, 1 to 512 rows, all cores. Every step reads every matrix
once, so none of them stays in a cache. The peer is `torch.nn.functional.linear`, and as well the
product with a matrix that lies in memory as [in, out]; the faster of the two counts. Turns
alternate; medians count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import BenchmarkRow, write_report
from kvbraid.model.matrix_product import matrix_product

NUM_LAYERS = 30
HIDDEN, KV_WIDTH, INTERMEDIATE, VOCABULARY = 576, 192, 1536, 49152
LAYER_SHAPES = (
    (HIDDEN + 2 * KV_WIDTH, HIDDEN),
    (HIDDEN, HIDDEN),
    (2 * INTERMEDIATE, HIDDEN),
    (HIDDEN, INTERMEDIATE),
)
SHAPES = (*LAYER_SHAPES * NUM_LAYERS, (VOCABULARY, HIDDEN))
ROW_COUNTS = (1, 2, 4, 8, 16, 64, 512)
NUM_TURNS = 15

Product = Callable[[Tensor], object]


def run_step(products: Sequence[Product], inputs: Mapping[int, Tensor]) -> None:
    """inputs: by their size."""
    for (_, num_inputs), product in zip(SHAPES, products, strict=True):
        product(inputs[num_inputs])


def seconds(product: Callable[[], object]) -> float:
    """Of one call."""
    began = time.perf_counter()
    product()
    return time.perf_counter() - began


def medians(products: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of each, in turns; the first turn does not count."""
    turns = [[seconds(product) for product in products] for _ in range(NUM_TURNS + 1)]
    return [statistics.median(times) for times in zip(*turns[1:], strict=True)]


def measure() -> Iterator[BenchmarkRow]:
    """One row for each number of rows."""
    weights = [torch.randn(shape) for shape in SHAPES]
    turned = [weight.t().contiguous() for weight in weights]
    forms: list[list[Product]] = [
        [matrix_product([weight]).forward for weight in weights],
        [partial(F.linear, weight=weight) for weight in weights],
        [partial(torch.mm, mat2=weight) for weight in turned],
    ]
    for num_rows in ROW_COUNTS:
        inputs = {size: torch.randn(num_rows, size) for size in (HIDDEN, INTERMEDIATE)}
        ours, linear, mm = medians([partial(run_step, form, inputs) for form in forms])
        peer = min(linear, mm)
        case = f"{num_rows} rows: ms of a step's products, ours / the faster of torch's"
        yield BenchmarkRow(case, ours * 1e3, peer * 1e3, ours / peer, 1.0, ours <= peer)


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the rows; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the rows")
    args = parser.parse_args(argv)
    rows = []
    for row in measure():
        rows.append(row)
        print(f"{row.case}: {row.ours:.1f} / {row.peer:.1f} = {row.ratio:.2f}", flush=True)
    if args.json is not None:
        write_report(args.json, "cpu_products", rows)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
