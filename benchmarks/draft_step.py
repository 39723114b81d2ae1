"""Milliseconds of a draft step on one GPU: CUDA graphs against eager launches.

python -m benchmarks.draft_step --json benchmarks/results/draft_step_h200.json

A step of an embedded proposer as a decode worker makes it: two new rows of each sequence, from host
memory, then three drafts, back on the host. bfloat16, contexts of 200 to 900 rows, batch 1, 8 and
64, greedy and at temperature 1. Eager and captured steps take turns; medians count. Bars: graphs
are not slower, and 0.5 ms a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.report import BenchmarkRow, write_report
from kvbraid.speculative.drafter import Drafter, load_drafter
from kvbraid.speculative.proposal import DraftSampling, DraftTask, Proposal
from kvbraid.speculative.proposer import Proposer
from kvbraid.worker.proposer_assembly import build_proposer

ASSETS = Path("tests/assets")
TARGET = ASSETS / "tiny-mla"
DRAFTERS = ("tiny-mla-dspark", "tiny-mla-eagle3")
BATCHES = (1, 8, 64)
BAR_MS = 0.5
NUM_DRAFTS, NUM_ROWS = 3, 2
SHORTEST, LONGEST, MAX_LEN = 200, 900, 4096
NUM_WARM, NUM_ROUNDS, NUM_STEPS = 20, 5, 40


class Sequences:
    """A batch of sequences in one proposer, each a little further after every step."""

    def __init__(self, proposer: Proposer, batch: int, dtype: torch.dtype) -> None:
        self._proposer = proposer
        self._dtype = dtype
        lengths = torch.linspace(SHORTEST, LONGEST, batch).int().tolist()
        self._positions = [0] * batch
        for i, length in enumerate(lengths):
            proposer.step([self._task(i, length, 0, DraftSampling())])

    def seconds(self, sampling: DraftSampling) -> float:
        """Of one step."""
        tasks = [self._task(i, NUM_ROWS, NUM_DRAFTS, sampling) for i in range(len(self._positions))]
        began = time.perf_counter()
        answers = self._proposer.step(tasks)
        took = time.perf_counter() - began
        for answer in answers:
            if not isinstance(answer, Proposal) or len(answer.token_ids) != NUM_DRAFTS:
                raise RuntimeError(f"{answer} must have {NUM_DRAFTS} drafts")
        return took

    def end(self) -> None:
        for i in range(len(self._positions)):
            self._proposer.drop(str(i))

    def _task(
        self, index: int, num_rows: int, num_drafts: int, sampling: DraftSampling
    ) -> DraftTask:
        first = self._positions[index]
        self._positions[index] += num_rows
        rows = torch.randn(num_rows, self._proposer.config.fused_width, dtype=self._dtype)
        ids = (7,) * num_rows
        return DraftTask(str(index), first, rows, ids, ids[-1], num_drafts, sampling)


def milliseconds(
    drafter: Drafter, proposers: Sequence[Proposer], batch: int, sampling: DraftSampling
) -> list[float]:
    """Median of a step in each proposer."""
    sequences = [Sequences(proposer, batch, drafter.dtype) for proposer in proposers]
    found: list[list[float]] = [[] for _ in proposers]
    for each in sequences:
        for _ in range(NUM_WARM):
            each.seconds(sampling)
    for _ in range(NUM_ROUNDS):
        for each, times in zip(sequences, found, strict=True):
            times += [each.seconds(sampling) for _ in range(NUM_STEPS)]
    for each in sequences:
        each.end()
    return [1000 * statistics.median(times) for times in found]


def rows_of(name: str, device: str) -> Iterator[BenchmarkRow]:
    """Both ways at every batch, and whether graphs reach the bar."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    drafter = load_drafter(ASSETS / name, TARGET, dtype=dtype, device=device)
    most = max(BATCHES)
    graphs, eager = (
        build_proposer(
            drafter,
            cuda_graphs=wanted,
            num_kv_tokens=most * MAX_LEN,
            max_sequences=most,
            max_len=MAX_LEN,
        )
        for wanted in ("auto", "never")
    )
    for batch in BATCHES:
        for way, temperature in (("greedy", 0.0), ("drawn", 1.0)):
            sampling = DraftSampling(temperature, 5)
            ours, peer = milliseconds(drafter, (graphs, eager), batch, sampling)
            case = f"{name}, batch {batch}, {way}"
            ratio = peer / ours
            yield BenchmarkRow(f"{case}: eager / graphs (ms)", ours, peer, ratio, 1.0, ratio >= 1.0)
            yield BenchmarkRow(
                f"{case}: {BAR_MS} ms / graphs", ours, BAR_MS, BAR_MS / ours, 1.0, ours <= BAR_MS
            )


def main() -> int:
    """Measure, print and write; exit code 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafter", action="append", help="folder in tests/assets [both]")
    parser.add_argument("--device", default="cuda", help="cpu tries the program out")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    rows: list[BenchmarkRow] = []
    for name in options.drafter or DRAFTERS:
        for row in rows_of(name, options.device):
            rows.append(row)
            sys.stdout.write(f"{row.case}: {row.ours:.3f}, {row.peer:.3f} = {row.ratio:.2f}\n")
            sys.stdout.flush()
    if options.json:
        write_report(options.json, "draft_step", rows)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
