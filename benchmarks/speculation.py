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
than what is to be seen: a sample there is as many groups of prompts as take most of a second,
processes of one role share their cores, and a second plain cluster, the control, is compared with
the first one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.clusters import Clusters
from benchmarks.random_drafter import write_random_drafter
from benchmarks.report import BenchmarkRow, write_report
from benchmarks.service_streams import DraftCounts, Sample, run_streams
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

Pairs = list[tuple[Sample, Sample]]
"""(plain, drafted) of each round."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured. bar: of the first drafter's median with one stream; floor: of every
    drafter at every batch, all pairs together as well. sample_s: least seconds of a plain sample;
    at least one group of prompts."""

    model: str
    drafters: tuple[str, ...]
    prompts: tuple[str, ...]
    decode: str
    device: str
    dtype: str
    batches: tuple[int, ...]
    repeats: int
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


def measure(
    options: Options, addresses: dict[str, str], batch: int, end: float
) -> dict[str, Pairs]:
    """Pairs of each drafter; at least one, and no round that `end` is not expected to allow."""
    for address in addresses.values():
        for size in _sizes(batch):
            run_streams(address, options.texts(0, size), _WARMUP_TOKENS, max_draft_tokens=0)
    found: dict[str, Pairs] = {drafter: [] for drafter in addresses if drafter != PLAIN}
    num_groups = _num_groups(options, addresses[PLAIN], batch)
    longest_s = 0.0
    for round_number in range(options.repeats):
        began = time.monotonic()
        if round_number and began + longest_s > end:
            break
        first = round_number * num_groups
        groups = [options.texts(first + i, batch) for i in range(num_groups)]
        taken = _round(options, addresses, groups, round_number)
        for drafter, pairs in found.items():
            pairs.append((taken[PLAIN], taken[drafter]))
        longest_s = max(longest_s, time.monotonic() - began)
    return found


def _sizes(batch: int) -> list[int]:
    """Powers of two, then `batch`: what graphs are captured for, met again as streams end."""
    return [1 << i for i in range((batch - 1).bit_length())] + [batch]


def _num_groups(options: Options, address: str, batch: int) -> int:
    """Groups of prompts in a sample."""
    if not options.sample_s:
        return 1
    seconds = run_streams(address, options.texts(0, batch), options.max_tokens).seconds
    return math.ceil(options.sample_s / seconds)


def _round(
    options: Options, addresses: dict[str, str], groups: Sequence[list[str]], round_number: int
) -> dict[str, Sample]:
    names = list(addresses)
    first = round_number % len(names)
    return {
        name: Sample.joined(
            [run_streams(addresses[name], texts, options.max_tokens) for texts in groups]
        )
        for name in names[first:] + names[:first]
    }


def control_row(case: str, pairs: Pairs) -> BenchmarkRow:
    """The second plain cluster's rate over the first one's: what may differ where nothing does."""
    ratios = [ours.rate / peer.rate for peer, ours in pairs]
    peer, ours = (
        statistics.median(sample.rate for sample in side) for side in zip(*pairs, strict=True)
    )
    title = f"{case}: tokens/s of a second plain cluster / plain, median of {len(pairs)} pairs"
    return _barred(title, ours, peer, statistics.median(ratios), None)


def rows_of(case: str, pairs: Pairs, options: Options, bar: float | None) -> list[BenchmarkRow]:
    """Rates against plain decoding and against bars, then what was drafted for them."""
    plain, drafted = zip(*pairs, strict=True)
    ratio = statistics.median(ours.rate / peer.rate for peer, ours in pairs)
    ours, peer = (statistics.median(s.rate for s in side) for side in (drafted, plain))
    title = f"{case}: tokens/s with drafts / plain"
    rows = [_barred(f"{title}, median of {len(pairs)} pairs", ours, peer, ratio, bar)]
    whole, plain_whole = _whole_rate(drafted), _whole_rate(plain)
    rows.append(
        _barred(
            f"{title}, all pairs with what was learnt in them",
            whole,
            plain_whole,
            whole / plain_whole,
            options.floor,
        )
    )
    first_plain, first = pairs[0]
    rows.append(
        _barred(
            f"{title}, first pair",
            first.rate,
            first_plain.rate,
            first.rate / first_plain.rate,
            None,
        )
    )
    return [*rows, *_draft_rows(case, drafted), _equality(case, pairs, options)]


def _whole_rate(samples: Sequence[Sample]) -> float:
    return sum(s.num_tokens for s in samples) / sum(s.seconds for s in samples)


def _draft_rows(case: str, drafted: Sequence[Sample]) -> Iterator[BenchmarkRow]:
    counts = DraftCounts.of(drafted)
    num_tokens = sum(sample.num_tokens for sample in drafted)
    rows = counts.num_verified + counts.num_windows
    for what, ours, peer in (
        ("acceptance length: tokens / windows", counts.acceptance_length * counts.num_windows,
         counts.num_windows),
        ("accepted / verified drafts", counts.num_accepted, counts.num_verified),
        ("steps with drafts / steps of all streams", counts.num_windows, counts.num_steps),
        ("verify tokens / tokens emitted", rows, num_tokens),
    ):  # fmt: skip
        yield _barred(f"{case}: {what}", ours, peer, ours / max(1, peer), None)


def _equality(case: str, pairs: Pairs, options: Options) -> BenchmarkRow:
    streams = [
        a.token_ids == b.token_ids
        for plain, drafted in pairs
        for a, b in zip(plain.streams, drafted.streams, strict=True)
    ]
    # Batches of other sizes are added up in another order on GPUs: near ties may flip.
    bar = 1.0 if options.dtype == "float32" and not options.is_gpu else None
    equal, share = sum(streams), sum(streams) / len(streams)
    return _barred(f"{case}: streams with equal tokens", equal, len(streams), share, bar)


def _barred(case: str, ours: float, peer: float, ratio: float, bar: float | None) -> BenchmarkRow:
    return BenchmarkRow(case, ours, peer, ratio, bar, bar is None or ratio >= bar)


def run(options: Options, deadline_s: float) -> Iterator[BenchmarkRow]:
    """Rows as they are found. Side by side on a GPU; on a CPU one drafter after the other, for
    idle clusters take its memory."""
    groups = [(CONTROL, *options.drafters)] if options.is_gpu else [(d,) for d in options.drafters]
    deadline = Deadline(deadline_s, len(groups) * len(options.batches))
    for group in groups:
        with Clusters() as clusters:
            addresses = clusters.start({d: options.spec(d) for d in (PLAIN, *group)})
            if options.is_gpu:
                clusters.share_cores()
            settle_heap()
            for batch in options.batches:
                found = measure(options, addresses, batch, deadline.next_case())
                for drafter, pairs in found.items():
                    is_first = (drafter, batch) == (options.drafters[0], 1)
                    case = f"{Path(options.model).name} {Path(drafter).name} x{batch}"
                    bar = options.bar if is_first else options.floor
                    if drafter == CONTROL:
                        yield control_row(case, pairs)
                    else:
                        yield from rows_of(case, pairs, options, bar)


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
        max_tokens=given.max_tokens,
        bar=given.bar if given.bar is not None else (floor if is_gpu else CPU_BAR),
        floor=floor,
        sample_s=sample_s,
    )


def main() -> int:
    """Measure, print and write; exit code 1 when a bar is missed."""
    given = _parse()
    rows: list[BenchmarkRow] = []
    with tempfile.TemporaryDirectory() as folder:
        options = _options(given, Path(folder) / "random-drafter")
        for row in run(options, given.budget):
            rows.append(row)
            verdict = "holds" if row.holds else "MISSED"
            suffix = "" if row.bar is None else f" (bar {row.bar}: {verdict})"
            print(f"{row.case}: {row.ours:.2f} / {row.peer:.2f} = {row.ratio:.3f}{suffix}")
            sys.stdout.flush()
            if given.json:
                write_report(given.json, "speculation", rows)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
