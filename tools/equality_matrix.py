"""Greedy tokens equal transformers' in every layout: the full matrix at the engine seam.

python -m tools.equality_matrix --json benchmarks/results/equality_matrix.json

Every topology x (page size, interleave) x chunking x exchange x q_mode with the shared-memory
communicator, and a pairwise covering set of the same with gloo. Each case runs one prompt alone,
a mixed batch of eight whose lengths straddle the stripe and page borders, and the longest prompt
again on the warm prefix cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import BenchmarkRow, write_report
from kvbraid.model.loader import load_config
from tools.engine_case import Case, Prompt
from tools.engine_world import EngineWorld
from tools.greedy_reference import Continuation, greedy_continuation, load_reference_model
from tools.pairwise import pairwise_rows

TOPOLOGIES = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4)]
PAGES = [(1, 1), (4, 1), (4, 4), (16, 1), (16, 16)]
CHUNKS = [512, 7]
EXCHANGES = ["ag_rs", "a2a"]
Q_MODES = ["gather", "replicate"]
LONG = 150
NUM_TOKENS = 5


@dataclass(frozen=True, slots=True)
class Job:
    """One world and the cases that it runs."""

    model: str
    tp_size: int
    dcp_size: int
    communicator: str
    cases: tuple[Case, ...]


def lengths(page_size: int, dcp_size: int) -> list[int]:
    """Eight prompt lengths around the borders of a stripe and of a logical page."""
    c, page = dcp_size, page_size * dcp_size
    around = [1, c - 1, c, c + 1, page - 1, page, page + 1, LONG]
    return [max(1, n) for n in around]


def jobs(models: list[str], *, quick: bool) -> Iterator[Job]:
    """Every world of the matrix; `quick` keeps a pairwise covering set of each."""
    for model, (tp_size, dcp_size) in itertools.product(models, TOPOLOGIES):
        communicators = ["shared_memory", "gloo"] if tp_size > 1 else ["shared_memory"]
        for communicator in communicators:
            whole = communicator == "shared_memory" and not quick
            cases = tuple(_all_cases(dcp_size) if whole else _covering_cases(dcp_size))
            yield Job(model, tp_size, dcp_size, communicator, cases)


def _factors(dcp_size: int) -> dict[str, list[object]]:
    striped = dcp_size > 1
    return {
        "pages": list(PAGES),
        "chunk": list(CHUNKS),
        "exchange": list(EXCHANGES if striped else EXCHANGES[:1]),
        "q_mode": list(Q_MODES if striped else Q_MODES[:1]),
    }


def _case(row: dict[str, object]) -> Case:
    pages = row["pages"]
    assert isinstance(pages, tuple)
    page_size, interleave = pages
    return Case(
        page_size=page_size,
        interleave=interleave,
        exchange=str(row["exchange"]),
        q_mode=str(row["q_mode"]),
        chunk_tokens=int(str(row["chunk"])),
        kv_cache_tokens=2048,
        max_model_len=512,
    )


def _all_cases(dcp_size: int) -> Iterator[Case]:
    factors = _factors(dcp_size)
    # q_mode outermost: each value means other weights.
    for values in itertools.product(*(factors[name] for name in reversed(factors))):
        yield _case(dict(zip(reversed(factors), values, strict=True)))


def _covering_cases(dcp_size: int) -> Iterator[Case]:
    rows = pairwise_rows(_factors(dcp_size), seed=dcp_size)
    yield from sorted(map(_case, rows), key=lambda case: case.q_mode)


class References:
    """transformers' continuation of the first n tokens of one long text, made on first use."""

    def __init__(self, model: str) -> None:
        self._path = model
        self._model = load_reference_model(model)
        config = load_config(model)
        step, vocab = 7919, config.vocab_size
        # A fixed text of ordinary token ids: the models continue it one way or another.
        self.text = tuple(50 + (i * i * step + 31 * i) % (vocab - 60) for i in range(LONG))
        self._known: dict[int, Continuation] = {}

    def __getitem__(self, length: int) -> Continuation:
        if length not in self._known:
            self._known[length] = greedy_continuation(self._model, self.text[:length], NUM_TOKENS)
        return self._known[length]


def run_case(
    world: EngineWorld, case: Case, dcp_size: int, references: References, number: int
) -> list[str]:
    """What is wrong with a case, nothing when all is well."""
    wanted = lengths(case.page_size, dcp_size)
    phases = [[wanted[number % 8]], wanted, [LONG]]
    outcome = world.run(case, [[_prompt(references, n) for n in phase] for phase in phases])
    faults = [
        f"length {n}: {tokens}, not {references[n].token_ids}"
        for phase, results in zip(phases, outcome.tokens, strict=True)
        for n, tokens in zip(phase, results, strict=True)
        if not references[n].agrees_with(tokens)
    ]
    if outcome.cached[2][0] < 64:
        faults.append(f"the warm prefix gave {outcome.cached[2][0]} cached tokens")
    return faults


def _prompt(references: References, length: int) -> Prompt:
    return Prompt(references.text[:length], NUM_TOKENS)


def main() -> int:
    """Run the matrix; exit code 1 when any case differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--model", action="append", required=True, help="model folder; repeatable")
    parser.add_argument("--quick", action="store_true", help="pairwise covering sets only")
    options = parser.parse_args()
    rows: list[BenchmarkRow] = []
    references = {model: References(model) for model in options.model}
    began = time.monotonic()
    for job in jobs(options.model, quick=options.quick):
        with EngineWorld(
            job.model,
            tp_size=job.tp_size,
            dcp_size=job.dcp_size,
            communicator=job.communicator,
        ) as world:
            for number, case in enumerate(job.cases):
                faults = run_case(world, case, job.dcp_size, references[job.model], number)
                name = f"{Path(job.model).name} tp{job.tp_size}dcp{job.dcp_size} {job.communicator}"
                detail = json.dumps(asdict(case) | {"faults": faults})
                rows.append(BenchmarkRow.equality(f"{name} {detail}", not faults))
                _say(f"{name} {number + 1}/{len(job.cases)} {faults or 'ok'}")
    failed = [row for row in rows if not row.holds]
    _say(f"{len(rows)} cases, {len(failed)} failed, {time.monotonic() - began:.0f} s")
    if options.json:
        write_report(options.json, "equality_matrix", rows)
    return 1 if failed else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
