"""Predicts, not measures: DCP 2, 4 and 8 against TP of as many ranks, a decode attention layer.

python -m benchmarks.predicted_dcp --json benchmarks/results/predicted_dcp.json

Needs no GPU: it reads attention_h200.json and exchange_h200.json. The model, and what it ignores,
is in benchmarks/dcp_cost_model.py. Rows:

- fit: latency in us (ours) and GB/s (peer) of each exchange's line.
- check: predicted us (ours) against measured us (peer) of the two-GPU layers of exchange_h200.json;
  ratio: predicted / measured. TP's times went into the model, DCP's did not.
- margin: the worst measured / predicted of DCP's checks, at least 1.
- predicted: us of DCP (ours) and of TP (peer); ratio: TP / DCP, above 1 where DCP is faster.
- crossover: the least context in K (ours) from which on DCP, its time multiplied by the margin, is
  as fast as TP; 0.0 for none up to 1024K.
- KV rows a rank of one layer: DCP (ours) and TP (peer).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from benchmarks.dcp_cost_model import EXCHANGES, PEERS, CostModel
from benchmarks.report import BenchmarkRow, write_report
from benchmarks.result_rows import RESULTS, ResultRows

HEADS = (16, 128)
BATCHES = (1, 8, 64)
SIZES = (2, 4, 8)
CONTEXTS_K = (8, 16, 32, 64, 128, 256)
MOST_CONTEXT_K = 1024

_LAYER = r"layer mla (\d+) heads, (\d+) x (\d+)K: one GPU / (tp 2|dcp 2 (?:fused|a2a))"


def row(case: str, ours: float, peer: float, ratio: float) -> BenchmarkRow:
    """Nothing here has a bar."""
    return BenchmarkRow(case, ours, peer, ratio, None, True)


def fit_rows(model: CostModel) -> Iterator[BenchmarkRow]:
    """Latency and rate of each exchange."""
    for name, line in model.lines.items():
        rate = 1e-3 / line.us_per_byte
        yield row(f"fit {name}: latency us, GB/s", line.latency_us, rate, 0.0)


def check_rows(model: CostModel, exchange: ResultRows) -> Iterator[BenchmarkRow]:
    """Predicted / measured of the c = 2 layers. Both bounds are equal there."""
    for match, measured in exchange.matching(_LAYER):
        heads, batch, context_k = (int(match[i]) for i in (1, 2, 3))
        context = context_k * 1024
        name = match[4].removeprefix("dcp 2 ")
        predicted = (
            model.tp_us(heads, batch, context, 2)
            if name == "tp 2"
            else model.dcp_us(name, heads, batch, context, 2, "parallel")
        )
        case = f"check mla {heads} heads, {batch} x {context_k}K, {match[4]}: predicted / measured"
        yield row(case, predicted, measured.ours, predicted / measured.ours)


def predicted_rows(model: CostModel) -> Iterator[BenchmarkRow]:
    """The grid."""
    grid = product(HEADS, BATCHES, CONTEXTS_K, SIZES, EXCHANGES, PEERS)
    for heads, batch, context_k, size, name, peers in grid:
        tp = model.tp_us(heads, batch, context_k * 1024, size)
        dcp = model.dcp_us(name, heads, batch, context_k * 1024, size, peers)
        layout = f"{heads} heads, {batch} x {context_k}K, c {size}, {name}, peers in {peers}"
        yield row(f"predicted mla {layout}: dcp against tp", dcp, tp, tp / dcp)


def margin_row(checks: Sequence[BenchmarkRow]) -> BenchmarkRow:
    """What DCP's predicted times have to be multiplied by so that none is below the measured."""
    errors = [1 / check.ratio for check in checks if ", dcp 2 " in check.case]
    return row("margin: worst measured / predicted of dcp 2", max([1.0, *errors]), 0.0, 0.0)


def crossover_k(
    model: CostModel, margin: float, heads: int, batch: int, size: int, name: str, peers: str
) -> float:
    """Least context, in K, from which on up to MOST_CONTEXT_K margin * DCP <= TP; 0 for none."""
    found = 0
    for context_k in range(MOST_CONTEXT_K, 0, -1):
        tp = model.tp_us(heads, batch, context_k * 1024, size)
        dcp = model.dcp_us(name, heads, batch, context_k * 1024, size, peers)
        if margin * dcp > tp:
            break
        found = context_k
    return float(found)


def crossover_rows(model: CostModel, margin: float) -> Iterator[BenchmarkRow]:
    """One a layout."""
    for heads, batch, size, name, peers in product(HEADS, BATCHES, SIZES, EXCHANGES, PEERS):
        least = crossover_k(model, margin, heads, batch, size, name, peers)
        layout = f"{heads} heads, batch {batch}, c {size}, {name}, peers in {peers}"
        yield row(f"crossover mla {layout}: K of context", least, 0.0, 0.0)


def kv_rows() -> Iterator[BenchmarkRow]:
    """Latent rows that a rank keeps of one layer."""
    for batch, context_k, size in product(BATCHES, CONTEXTS_K, SIZES):
        whole = batch * context_k * 1024
        case = f"KV rows a rank, {batch} x {context_k}K: dcp {size} against tp {size}"
        yield row(case, whole / size, whole, float(size))


def markdown(rows: ResultRows) -> Iterator[str]:
    """The table of docs/attention.md: fused, from "peers in turn" to "peers in parallel"."""
    shown = (8, 32, 128, 256)
    columns = [f"{context_k}K" for context_k in shown]
    crossovers = [f"from, {name}" for name in EXCHANGES]
    yield "| " + " | ".join(["layer", "c", *columns, *crossovers]) + " |"
    yield "|---" * (2 + len(columns) + len(crossovers)) + "|"
    for heads, batch, size in product(HEADS, BATCHES, SIZES):
        cells = [f"{heads} heads, batch {batch}", str(size)]
        for context_k in shown:
            case = f"predicted mla {heads} heads, {batch} x {context_k}K, c {size}, fused, peers in"
            found = [rows.row(f"{case} {peers}: dcp against tp").ratio for peers in PEERS]
            cells.append(_span([f"{ratio:.2f}" for ratio in found]))
        for name in EXCHANGES:
            case = f"crossover mla {heads} heads, batch {batch}, c {size}, {name}, peers in"
            least = [rows.row(f"{case} {peers}: K of context").ours for peers in PEERS]
            cells.append(_span([f"{k:.0f}K" if k else "never" for k in reversed(least)]))
        yield "| " + " | ".join(cells) + " |"


def _span(ends: list[str]) -> str:
    """Of (one end, other end), the last one first; equal ends once."""
    return ends[0] if ends[0] == ends[1] else f"{ends[1]} to {ends[0]}"


def predict(results: Path) -> list[BenchmarkRow]:
    """All rows, from the measured ones in `results`."""
    exchange = ResultRows.load(results / "exchange_h200.json")
    model = CostModel.from_results(ResultRows.load(results / "attention_h200.json"), exchange)
    checks = list(check_rows(model, exchange))
    margin = margin_row(checks)
    return [
        *fit_rows(model),
        *checks,
        margin,
        *predicted_rows(model),
        *crossover_rows(model, margin.ours),
        *kv_rows(),
    ]


def main() -> int:
    """Always 0: predictions have no bars."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of measured results")
    parser.add_argument("--json", type=Path, help="write the result file here")
    parser.add_argument("--markdown", action="store_true", help="print the table of the page only")
    options = parser.parse_args()
    rows = predict(options.results)
    if options.markdown:
        print("\n".join(markdown(ResultRows("predictions", rows))))
    else:
        for entry in rows:
            print(f"{entry.case}: {entry.ours:.2f}, {entry.peer:.2f}: {entry.ratio:.3f}")
    if options.json:
        write_report(options.json, "predicted_dcp", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
