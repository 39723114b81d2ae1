"""Greedy tokens and logits of reference prompts equal transformers' on every topology.

python -m tools.reference_prompts --reference MODEL_DIR PROMPTS.jsonl --json PATH

A line of the file has prompt_ids, output_ids and gaps: transformers' float32 continuation and how
far its two best logits are apart. Each topology takes its own part of the prompts, short and long
ones, all as one batch, and the longest again on the warm prefix cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import BenchmarkRow, write_report
from tools.engine_case import Case, Prompt
from tools.engine_world import EngineWorld
from tools.equality_matrix import TOPOLOGIES
from tools.greedy_reference import NEAR_TIE, load_reference_model

NUM_PROMPTS = 16
NUM_TOKENS = 24
MOST_PROMPT_TOKENS = 400
LOGITS_BAR = 2e-4
CASE = Case(kv_cache_tokens=8192, max_num_seqs=NUM_PROMPTS, exchange="a2a", record_logits=True)

Row = dict[str, Any]


def rows_for(path: Path, topology: int) -> list[Row]:
    """NUM_PROMPTS lines, spread over all lengths; others for every topology."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    fitting = [row for row in rows if len(row["prompt_ids"]) <= MOST_PROMPT_TOKENS]
    fitting.sort(key=lambda row: len(row["prompt_ids"]))
    step = max(1, len(fitting) // NUM_PROMPTS)
    return fitting[topology % step :: step][:NUM_PROMPTS]


def agrees(row: Row, tokens: list[int]) -> bool:
    """Whether `tokens` are the reference's up to its first near tie."""
    ties = [i for i, gap in enumerate(row["gaps"]) if gap < NEAR_TIE]
    n = min([*ties, len(tokens)])
    return bool(tokens[:n] == row["output_ids"][:n])


@torch.inference_mode()
def logits_row(name: str, models: tuple[Any, Any], row: Row, ours: torch.Tensor) -> BenchmarkRow:
    """Largest logit difference along our own tokens, against the bar of the project."""
    length = len(row["prompt_ids"])
    ids = torch.tensor([[*row["prompt_ids"], *row["output_ids"][: len(ours) - 1]]])
    sdpa, eager = (model(ids).logits[0, length - 1 :] for model in models)
    bar = max(LOGITS_BAR, 4 * float((sdpa - eager).abs().max()))
    worst = float((ours - sdpa).abs().max())
    case = f"{name}: largest logit difference of the longest prompt / bar"
    return BenchmarkRow(case, worst, bar, worst / bar, 1.0, worst <= bar)


def check(model: str, path: Path) -> Iterator[BenchmarkRow]:
    """Rows of one model."""
    models = load_reference_model(model), load_reference_model(model, attention="eager")
    for number, (tp_size, dcp_size) in enumerate(TOPOLOGIES):
        name = f"{Path(model).name} tp{tp_size}dcp{dcp_size}"
        rows = rows_for(path, number)
        asked = [
            Prompt(tuple(row["prompt_ids"]), min(NUM_TOKENS, len(row["output_ids"])))
            for row in rows
        ]
        with EngineWorld(model, tp_size=tp_size, dcp_size=dcp_size) as world:
            outcome = world.run(CASE, [asked, asked[-1:]])
        found = [*outcome.tokens[0], *outcome.tokens[1]]
        wrong = [
            row["id"]
            for row, tokens in zip([*rows, rows[-1]], found, strict=True)
            if not agrees(row, tokens)
        ]
        case = f"{name}: {len(found)} answers, prompts that differ: {wrong}"
        yield BenchmarkRow.equality(case, not wrong)
        if found[-1] == rows[-1]["output_ids"][: len(found[-1])]:
            yield logits_row(name, models, rows[-1], outcome.logits[0][-len(found[-1]) :])


def main() -> int:
    """Check every model; exit code 1 when anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument(
        "--reference",
        nargs=2,
        action="append",
        required=True,
        metavar=("MODEL", "JSONL"),
        help="model folder and its prompts with transformers' answers; repeatable",
    )
    options = parser.parse_args()
    rows: list[BenchmarkRow] = []
    for model, path in options.reference:
        for row in check(model, Path(path)):
            rows.append(row)
            sys.stdout.write(f"{row.case}: {row.ours:.3g} / {row.peer:.3g} {row.holds}\n")
            sys.stdout.flush()
    if options.json:
        write_report(options.json, "reference_prompts", rows)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
