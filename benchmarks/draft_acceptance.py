"""Acceptance lengths in float32 and bfloat16, and those of the reference loop.

python -m benchmarks.draft_acceptance --model tests/assets/tiny-mla --device cuda \
    --drafter eagle3 tests/assets/tiny-mla-eagle3 --drafter dspark tests/assets/tiny-mla-dspark \
    --reference tests/assets/reference/tiny-mla-acceptance.jsonl --json benchmarks/results/x.json

Every window has all its drafts. `free`: each precision decodes what it finds best. `forced`: both
emit float32's own tokens, found first, so that windows differ by the drafts alone:
bfloat16's rounding may lead a free answer to another text, which is easier or harder to draft.
Acceptance length is the mean number of tokens that a full window emits. The spread of it between
texts is reported as the standard error of its mean.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.report import BenchmarkRow, write_report
from kvbraid.model.loader import load_config
from kvbraid.request import SamplingParams
from kvbraid.speculative.drafter_source import open_drafter
from kvbraid.tokenizer import load_tokenizer
from tools.chat_prompt import chat_prompt_ids
from tools.engine_case import Case, Outcome, Prompt
from tools.engine_world import EngineWorld

BAR = 0.05
DTYPES = ("float32", "bfloat16")
_POOL_TOKENS = 256
_BATCH = 16
_MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Accepted:
    """Accepted drafts of full windows, one number a window."""

    counts: tuple[int, ...]

    @property
    def length(self) -> float:
        """Tokens that a window emits."""
        return 1.0 + statistics.fmean(self.counts)

    @property
    def error(self) -> float:
        """Standard error of `length` if windows were independent."""
        return statistics.stdev(self.counts) / math.sqrt(len(self.counts))


def full_windows(outcome: Outcome, num_drafts: int) -> Accepted:
    """Those that verified as many drafts as the drafter makes."""
    windows = [window for step in outcome.windows for window in step]
    return Accepted(tuple(w.num_accepted for w in windows if w.num_verified == num_drafts))


def reference_windows(rows: Sequence[dict[str, Any]], kind: str) -> Accepted:
    """What the reference loop had for the same prompts."""
    return Accepted(tuple(count for row in rows for count in row[kind]["accepted"]))


@dataclass(frozen=True, slots=True)
class Drafter:
    """kind: its name in the reference's rows."""

    kind: str
    path: str
    num_drafts: int

    @property
    def case(self) -> Case:
        """As many sequences at once as the pool holds."""
        return Case(drafter=self.path, kv_cache_tokens=_BATCH * _POOL_TOKENS, max_num_seqs=_BATCH)


def measured(
    world: EngineWorld, drafter: Drafter, prompts: Sequence[Prompt]
) -> tuple[Accepted, list[list[int]]]:
    """Windows and tokens."""
    outcome = world.run(drafter.case, [prompts])
    return full_windows(outcome, drafter.num_drafts), outcome.tokens[0]


def rows_of(
    name: str, own: Accepted, peers: dict[str, Accepted], is_bar: bool
) -> Iterator[BenchmarkRow]:
    """The acceptance length against each peer's; ratio: the difference."""
    for peer, accepted in peers.items():
        difference = own.length - accepted.length
        yield BenchmarkRow(
            f"{name} - {peer}: acceptance length, {len(own.counts)} windows",
            own.length,
            accepted.length,
            difference,
            BAR if is_bar else None,
            not is_bar or abs(difference) <= BAR,
        )
    yield BenchmarkRow(f"{name}: standard error", own.error, own.length, 0.0, None, True)


class Measurement:
    """Prompts of a reference file, run in one precision after the other."""

    def __init__(self, model: str, device: str, reference: Path, num_prompts: int) -> None:
        rows = [json.loads(line) for line in reference.read_text().splitlines()]
        self._model = model
        self._device = device
        self._rows = rows[:num_prompts]
        stops = load_tokenizer(Path(model)).facts.eos_token_ids
        sampling = SamplingParams(temperature=0.0, seed=0, stop_token_ids=tuple(stops))
        self._prompts = [
            Prompt(tuple(chat_prompt_ids(Path(model), row["prompt"])), _MAX_TOKENS, sampling)
            for row in self._rows
        ]
        self._float32: dict[str, dict[str, Accepted]] = {}
        self._tokens: list[list[int]] = []

    def rows_of(self, drafters: Sequence[Drafter]) -> Iterator[BenchmarkRow]:
        """Of every precision and drafter. float32 comes first: it says what is forced."""
        communicator = "nccl" if self._device == "cuda" else "shared_memory"
        for dtype in DTYPES:
            with EngineWorld(
                self._model,
                tp_size=1,
                dcp_size=1,
                device=self._device,
                dtype=dtype,
                communicator=communicator,
            ) as world:
                for drafter in drafters:
                    yield from self._rows_of(world, drafter, dtype)

    def _rows_of(self, world: EngineWorld, drafter: Drafter, dtype: str) -> Iterator[BenchmarkRow]:
        free, tokens = measured(world, drafter, self._prompts)
        self._tokens = self._tokens or tokens
        forced = [
            replace(prompt, forced=tuple(emitted), max_tokens=len(emitted))
            for prompt, emitted in zip(self._prompts, self._tokens, strict=True)
        ]
        led, _ = measured(world, drafter, forced)
        reference = reference_windows(self._rows, drafter.kind)
        own = self._float32.setdefault(drafter.kind, {"free": free, "forced": led})
        name = f"{Path(self._model).name} {drafter.kind} {dtype}"
        peers = {} if dtype == "float32" else {"float32": own["forced"]}
        yield from rows_of(f"{name} forced", led, {**peers, "reference loop": reference}, True)
        peers = {} if dtype == "float32" else {"float32": own["free"]}
        yield from rows_of(f"{name} free", free, {**peers, "reference loop": reference}, False)


def main() -> int:
    """Measure, print and write; exit code 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="target folder")
    parser.add_argument(
        "--drafter",
        nargs=2,
        action="append",
        required=True,
        metavar=("KIND", "DIR"),
        help="name in the reference's rows, and folder; repeatable",
    )
    parser.add_argument("--reference", type=Path, required=True, help="JSON lines of the loop")
    parser.add_argument("--device", default="cpu", help="cpu or cuda [cpu]")
    parser.add_argument("--prompts", type=int, default=10_000, help="at most so many [all]")
    parser.add_argument("--json", type=Path, help="write the rows here, as they come")
    given = parser.parse_args()
    target = load_config(given.model)
    drafters = [
        Drafter(kind, path, open_drafter(path, target).config.max_draft_tokens)
        for kind, path in given.drafter
    ]
    rows: list[BenchmarkRow] = []
    measurement = Measurement(given.model, given.device, given.reference, given.prompts)
    for row in measurement.rows_of(drafters):
        rows.append(row)
        verdict = "" if row.bar is None else " holds" if row.holds else " MISSED"
        sys.stdout.write(
            f"{row.case}: {row.ours:.3f} / {row.peer:.3f}, {row.ratio:+.3f}{verdict}\n"
        )
        sys.stdout.flush()
        if given.json:
            write_report(given.json, "draft_acceptance", rows)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
