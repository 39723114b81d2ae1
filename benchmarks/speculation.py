"""Decoding with drafts against plain decoding, side by side through the real services.

python -m benchmarks.speculation --model DIR --drafter DIR [--drafter DIR] --prompts FILE.jsonl \
    --json benchmarks/results/speculation_cpu.json
python -m benchmarks.speculation --device cuda --dtype bfloat16 --adversary --batch 1 --batch 8 \
    --batch 64 --budget 150 ...        # one GPU, all clusters beside one another

Clusters of one layout, one of them without a drafter. In each round all of them answer the same
prompts, one cluster after the other, another one first each time; a pair is a round's plain and
drafted answer, and the median of the pairs' ratios counts. No pair is dropped: what workers know of
their drafter's worth when the first one begins is what they found out before they served. Before
it, each cluster answers without drafts. In float32 the tokens of a pair must be equal; elsewhere
the streams for which they are are counted.

On a GPU an answer of 96 tokens takes a tenth of a second, in which a machine's moods are larger
than what is to be seen: a sample there is as many prompts as take most of a second, and four for
each stream, the next of which begins when one ends. So as many streams run at once nearly all the
time, as in a server that has more to do, and not ever fewer while the slowest ones end, where
drafts would count for little. Processes of one role share their cores. Two clusters that are alike
differ by a few per cent all the same, for as long as they run. So there are two plain ones there:
what counts as plain is both of them together, and how far apart they are is told; with
--generations the pairs of several starts, each with its own learning, count together. Beside the
rates is told what drafting and verifying took in a step that drafts, by the workers' metrics.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.clusters import Clusters
from benchmarks.random_drafter import write_random_drafter
from benchmarks.report import BenchmarkRow, write_report
from benchmarks.service_streams import Sample, run_streams
from benchmarks.speculation_rows import Pairs, control_row, rows_of
from benchmarks.step_parts import PairedParts, part_rows, read_parts
from kvbraid.cluster.local_cluster import ClusterSpec
from kvbraid.cluster.worker_spec import WorkerSpec
from kvbraid.settled_heap import settle_heap

PLAIN = ""
CONTROL = "control"
CPU_BAR = 1.15
GPU_FLOOR = 0.97
# Tokens of a sequence, prompt included, that pools are made for.
_POOL_TOKENS = 320
_WARMUP_TOKENS = 16
_GPU_SAMPLE_S = 0.7
_FEWEST_GROUPS = 4


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured. bar: of the first drafter's median with one stream; floor: of every
    drafter at every batch, all pairs together as well. sample_s: least seconds of a plain sample;
    0: a prompt for each stream."""

    model: str
    drafters: tuple[str, ...]
    prompts: tuple[str, ...]
    decode: str
    device: str
    dtype: str
    batches: tuple[int, ...]
    repeats: int
    generations: int
    max_tokens: int
    bar: float | None
    floor: float | None
    sample_s: float

    @property
    def is_gpu(self) -> bool:
        """Whether idle clusters cost the others nothing but memory."""
        return self.device != "cpu"

    def spec(self, drafter: str) -> ClusterSpec:
        """A prefill and a decode worker; drafter: PLAIN or a folder."""
        size = max(self.batches)
        common = f"device={self.device},dtype={self.dtype}"
        common += f",kv_cache_tokens={max(8192, size * _POOL_TOKENS)},max_num_seqs={max(16, size)}"
        return ClusterSpec(
            model=self.model,
            prefill=(WorkerSpec.parse("prefill", f"tp=1,dcp=1,{common}"),),
            decode=(WorkerSpec.parse("decode", f"{self.decode},{common}"),),
            drafter=PLAIN if drafter == CONTROL else drafter,
        )

    def texts(self, number: int, batch: int) -> list[str]:
        """The prompts of a group."""
        first = number * batch
        return [self.prompts[(first + i) % len(self.prompts)] for i in range(batch)]


class Deadline:
    """Shares the seconds that are left among the cases that are left, from the first case on."""

    def __init__(self, seconds: float, num_cases: int) -> None:
        self._seconds = seconds
        self._num_left = num_cases
        self._end: float | None = None

    def next_case(self) -> float:
        """When the next case has to end, by time.monotonic."""
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._seconds
        share = (self._end - now) / max(1, self._num_left)
        self._num_left -= 1
        return now + share


def warm_up(options: Options, addresses: dict[str, str], batch: int) -> None:
    """Each cluster answers without drafts, at last as much as in a sample."""
    for address in addresses.values():
        for size in _sizes(batch):
            run_streams(address, options.texts(0, size), _WARMUP_TOKENS, max_draft_tokens=0)
        run_streams(address, options.texts(0, batch), options.max_tokens, max_draft_tokens=0)


def measure(
    options: Options, addresses: dict[str, str], batch: int, end: float
) -> dict[str, list[tuple[Sample, Sample]]]:
    """Pairs of each drafter; at least one, and no round that `end` is not expected to allow."""
    plain = [name for name in addresses if name in (PLAIN, CONTROL)]
    found: dict[str, list[tuple[Sample, Sample]]] = {
        drafter: [] for drafter in addresses if drafter != PLAIN
    }
    num_groups = _num_groups(options, addresses[PLAIN], batch)
    longest_s = 0.0
    for round_number in range(math.ceil(options.repeats / options.generations)):
        began = time.monotonic()
        if round_number and began + longest_s > end:
            break
        first = round_number * num_groups
        texts = [text for i in range(num_groups) for text in options.texts(first + i, batch)]
        taken = _round(options, addresses, texts, batch, round_number)
        peer = Sample.joined([taken[name] for name in plain])
        for drafter, pairs in found.items():
            pairs.append((taken[PLAIN] if drafter == CONTROL else peer, taken[drafter]))
        longest_s = max(longest_s, time.monotonic() - began)
    return found


def _sizes(batch: int) -> list[int]:
    """Powers of two, then `batch`: what graphs are captured for, met again as streams end."""
    return [1 << i for i in range((batch - 1).bit_length())] + [batch]


def _num_groups(options: Options, address: str, batch: int) -> int:
    """Prompts in a sample, for each stream."""
    if not options.sample_s:
        return 1
    seconds = run_streams(address, options.texts(0, batch), options.max_tokens).seconds
    return max(_FEWEST_GROUPS, math.ceil(options.sample_s / seconds))


def _round(
    options: Options,
    addresses: dict[str, str],
    texts: Sequence[str],
    batch: int,
    round_number: int,
) -> dict[str, Sample]:
    names = list(addresses)
    first = round_number % len(names)
    return {
        name: run_streams(addresses[name], texts, options.max_tokens, num_at_once=batch)
        for name in names[first:] + names[:first]
    }


def run(options: Options, deadline_s: float) -> Iterator[list[BenchmarkRow]]:
    """All rows so far, after each case. Side by side on a GPU; on a CPU one drafter after the
    other, for idle clusters take its memory."""
    groups = [(CONTROL, *options.drafters)] if options.is_gpu else [(d,) for d in options.drafters]
    deadline = Deadline(deadline_s, options.generations * len(groups) * len(options.batches))
    found: dict[tuple[int, str], list[tuple[Sample, Sample]]] = defaultdict(list)
    parts: dict[tuple[int, str], PairedParts] = defaultdict(PairedParts)
    for group in groups * options.generations:
        with Clusters() as clusters:
            addresses = clusters.start({d: options.spec(d) for d in (PLAIN, *group)})
            settle_heap()
            for batch in options.batches:
                warm_up(options, addresses, batch)
                if options.is_gpu:
                    clusters.share_cores()
                metrics = clusters.decode_metrics()
                before = {name: read_parts(address) for name, address in metrics.items()}
                measured = measure(options, addresses, batch, deadline.next_case())
                taken = {n: read_parts(address).since(before[n]) for n, address in metrics.items()}
                for drafter, pairs in measured.items():
                    found[batch, drafter] += pairs
                    parts[batch, drafter] += PairedParts(taken[PLAIN], taken[drafter])
                yield rows(found, parts, options)


def rows(
    found: Mapping[tuple[int, str], Pairs],
    parts: Mapping[tuple[int, str], PairedParts],
    options: Options,
) -> list[BenchmarkRow]:
    """Of the pairs and step parts by batch and drafter."""
    made: list[BenchmarkRow] = []
    for (batch, drafter), pairs in found.items():
        case = f"{Path(options.model).name} {Path(drafter).name} x{batch}"
        if drafter == CONTROL:
            made.append(control_row(case, pairs))
            continue
        is_first = (drafter, batch) == (options.drafters[0], 1)
        made += rows_of(
            case,
            pairs,
            bar=options.bar if is_first else options.floor,
            floor=options.floor,
            # Batches of other sizes are added up in another order on GPUs: near ties may flip.
            is_exact=options.dtype == "float32" and not options.is_gpu,
        )
        made += part_rows(case, parts[batch, drafter])
    return made


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="target folder")
    parser.add_argument("--drafter", action="append", required=True, help="drafter folder")
    parser.add_argument(
        "--adversary", action="store_true", help="also the first drafter with random weights"
    )
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with `prompt`")
    parser.add_argument("--decode", default="tp=1,dcp=1", help="decode worker [tp=1,dcp=1]")
    parser.add_argument("--device", default="cpu", help="cpu or cuda [cpu]")
    parser.add_argument("--dtype", default="float32", help="of the workers [float32]")
    parser.add_argument("--batch", type=int, action="append", help="streams at once [1 and 8]")
    parser.add_argument("--repeats", type=int, default=10, help="most pairs a case [10]")
    parser.add_argument(
        "--generations", type=int, default=1, help="times that clusters are started anew [1]"
    )
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of a stream [96]")
    parser.add_argument(
        "--sample-seconds", type=float, help="least length of a plain sample [0.7 on a GPU]"
    )
    parser.add_argument("--budget", type=float, default=1e9, help="seconds of all cases")
    parser.add_argument("--bar", type=float, help="of the first drafter, batch 1 [1.15 on a CPU]")
    parser.add_argument("--floor", type=float, help="of every drafter and batch [0.97 on a GPU]")
    parser.add_argument("--json", type=Path, help="write the rows here, after each case")
    return parser.parse_args()


def _options(given: argparse.Namespace, adversary: Path) -> Options:
    is_gpu = given.device != "cpu"
    floor = given.floor if given.floor is not None or not is_gpu else GPU_FLOOR
    sample_s = given.sample_seconds
    if sample_s is None:
        sample_s = _GPU_SAMPLE_S if is_gpu else 0.0
    drafters = list(given.drafter)
    if given.adversary:
        drafters.append(str(write_random_drafter(Path(drafters[0]), adversary)))
    return Options(
        model=given.model,
        drafters=tuple(drafters),
        prompts=tuple(json.loads(x)["prompt"] for x in given.prompts.read_text().splitlines()),
        decode=given.decode,
        device=given.device,
        dtype=given.dtype,
        batches=tuple(given.batch or (1, 8)),
        repeats=given.repeats,
        generations=given.generations,
        max_tokens=given.max_tokens,
        bar=given.bar if given.bar is not None else (floor if is_gpu else CPU_BAR),
        floor=floor,
        sample_s=sample_s,
    )


def main() -> int:
    """Measure, print and write; exit code 1 when a bar is missed."""
    given = _parse()
    # Where strings fall in dictionaries is drawn anew for each process otherwise: one difference
    # less between clusters that are to be alike.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    found: list[BenchmarkRow] = []
    with tempfile.TemporaryDirectory() as folder:
        options = _options(given, Path(folder) / "random-drafter")
        for so_far in run(options, given.budget):
            for row in so_far:
                if row not in found:
                    _show(row)
            found = so_far
            if given.json:
                write_report(given.json, "speculation", found)
    return 0 if all(row.holds for row in found) else 1


def _show(row: BenchmarkRow) -> None:
    verdict = "holds" if row.holds else "MISSED"
    suffix = "" if row.bar is None else f" (bar {row.bar}: {verdict})"
    print(f"{row.case}: {row.ours:.2f} / {row.peer:.2f} = {row.ratio:.3f}{suffix}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
