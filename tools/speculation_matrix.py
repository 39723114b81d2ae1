"""Tokens with speculation equal tokens without, on every topology, at the engine seam.

python -m tools.speculation_matrix --case MODEL DRAFTER PROMPTS.jsonl [--case ...] --json PATH

A line of PROMPTS has prompt_ids. For each topology and draft length, one prompt alone and a mixed
batch of eight, greedy and sampled with penalties, bias and filters; in float32, so equal means
equal. A row also says how many drafts came true: none would prove nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import BenchmarkRow, write_report
from kvbraid.request import SamplingParams
from tools.engine_case import Case, Outcome, Prompt
from tools.engine_world import EngineWorld

TOPOLOGIES = ((1, 1), (2, 2), (3, 3), (4, 2), (4, 4))
# 0: as many as the drafter was trained for.
DRAFT_LENGTHS = (0, 1, 3)
NUM_TOKENS = 32
MOST_PROMPT_TOKENS = 160
SAMPLINGS = (
    SamplingParams(temperature=0.0, seed=0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, seed=2, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.2, seed=3, min_p=0.05),
    SamplingParams(temperature=0.0, seed=4, frequency_penalty=2.0, presence_penalty=1.0),
    SamplingParams(temperature=0.7, seed=5, repetition_penalty=1.4),
    SamplingParams(temperature=0.0, seed=6, logit_bias={5: 4.0, 17: -3.0}),
    SamplingParams(temperature=0.0, seed=7, min_tokens=12),
)


def mixed_batch(path: Path) -> list[Prompt]:
    """Eight prompts of a reference file, each with another sampling."""
    rows = [json.loads(line)["prompt_ids"] for line in path.read_text().splitlines()]
    fitting = [ids for ids in rows if 2 <= len(ids) <= MOST_PROMPT_TOKENS]
    step = max(1, len(fitting) // len(SAMPLINGS))
    return [
        Prompt(tuple(ids), max_tokens=NUM_TOKENS, sampling=sampling)
        for ids, sampling in zip(fitting[::step], SAMPLINGS, strict=False)
    ]


def rows_of(model: str, drafter: str, prompts: Path) -> Iterator[BenchmarkRow]:
    """One row a topology and draft length."""
    batch = mixed_batch(prompts)
    for tp_size, dcp_size in TOPOLOGIES:
        with EngineWorld(model, tp_size=tp_size, dcp_size=dcp_size) as world:
            plain = world.run(Case(), [batch]).tokens
            for length in DRAFT_LENGTHS:
                case = Case(drafter=drafter, max_draft_tokens=length)
                drafted = world.run(case, [batch[:1], batch])
                name = (
                    f"{Path(model).name} {Path(drafter).name} tp{tp_size}dcp{dcp_size} "
                    f"drafts {length or 'all'}"
                )
                yield _row(name, plain[0], drafted)


def _row(name: str, plain: list[list[int]], drafted: Outcome) -> BenchmarkRow:
    windows = [window for step in drafted.windows for window in step]
    num_verified = sum(window.num_verified for window in windows)
    num_accepted = sum(window.num_accepted for window in windows)
    is_equal = drafted.tokens == [plain[:1], plain]
    share = num_accepted / max(1, num_verified)
    return BenchmarkRow(
        f"{name}: accepted / verified drafts, tokens equal",
        num_accepted,
        num_verified,
        share,
        None,
        is_equal and num_accepted > 0,
    )


def main() -> int:
    """Run, print and write; exit code 1 when a row differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--case",
        nargs=3,
        action="append",
        required=True,
        metavar=("MODEL", "DRAFTER", "PROMPTS"),
        help="folders of target and drafter, and a file of prompts; repeatable",
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    rows: list[BenchmarkRow] = []
    for model, drafter, prompts in options.case:
        for row in rows_of(model, drafter, Path(prompts)):
            rows.append(row)
            verdict = "equal" if row.holds else "DIFFERS"
            sys.stdout.write(f"{row.case}: {row.ours:.0f} / {row.peer:.0f}, {verdict}\n")
            sys.stdout.flush()
    if options.json:
        write_report(options.json, "speculation_matrix", rows)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
