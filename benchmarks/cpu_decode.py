"""Decoding on CPU through the real services against transformers' generate, side by side.

python -m benchmarks.cpu_decode --model DIR --json benchmarks/results/cpu_decode.json

SmolLM2-135M-Instruct in float32. Ours is the whole way: a gRPC client, coordinator, prefill
worker, handoff, decode worker; time from sending the request to the last token. The peer is
`generate` in one process, same prompt, same number of greedy tokens, all cores. Repeats of all
cases are interleaved; the median of the ratios within a repeat counts. `where` rows say where our
time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.clusters import open_channel
from benchmarks.report import BenchmarkRow, write_report
from kvbraid.cluster.local_cluster import ClusterSpec, LocalCluster
from kvbraid.cluster.worker_spec import WorkerSpec
from kvbraid.v1 import coordinator_pb2, coordinator_pb2_grpc, generation_pb2
from tools.greedy_reference import load_reference_model

NUM_TOKENS = 64
PROMPT_TOKENS = 48
NUM_STREAMS = 8
STRIPED = (
    ("2x2 shared_memory", "tp=2,dcp=2", 0.8),
    ("2x2 gloo", "tp=2,dcp=2,communicator=gloo", None),
)


@dataclass
class Cluster:
    """A running `kvbraid up`."""

    name: str
    grpc: str
    metrics: dict[str, str]

    def step_seconds(self) -> tuple[float, float]:
        """(sum, count) of the decode worker's decode steps so far."""
        text = urllib.request.urlopen(f"http://{self.metrics['decode-0']}/metrics").read().decode()
        found = [
            float(
                re.findall(rf'kvbraid_engine_step_seconds_{part}{{kind="decode"}} (\S+)', text)[0]
            )
            for part in ("sum", "count")
        ]
        return found[0], found[1]


@contextmanager
def running_cluster(model: str, name: str, decode: str) -> Iterator[Cluster]:
    """Start and stop one."""
    spec = ClusterSpec(
        model=model,
        prefill=(WorkerSpec.parse("prefill", "tp=1,dcp=1,kv_cache_tokens=4096"),),
        decode=(WorkerSpec.parse("decode", f"{decode},kv_cache_tokens=4096"),),
    )
    with LocalCluster(spec) as cluster:
        cluster.start(timeout_s=300)
        metrics = {worker: report.metrics for worker, report in cluster.workers.items()}
        yield Cluster(name, cluster.coordinator.grpc, metrics)


def prompts(vocab_size: int) -> list[list[int]]:
    """Eight fixed prompts of ordinary tokens, different from one another."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(100, vocab_size, (PROMPT_TOKENS,), generator=generator).tolist()
        for _ in range(NUM_STREAMS)
    ]


async def generate(target: str, token_ids: list[list[int]]) -> float:
    """Seconds until every prompt has its NUM_TOKENS tokens. A fresh salt: nothing is cached."""
    async with open_channel(target) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        await channel.channel_ready()
        began = time.perf_counter()
        counts = await asyncio.gather(*(_one(stub, ids) for ids in token_ids))
        assert counts == [NUM_TOKENS] * len(token_ids)
        return time.perf_counter() - began


async def _one(stub: Any, token_ids: list[int]) -> int:
    request = coordinator_pb2.GenerateRequest(
        prompt_ids=coordinator_pb2.TokenIds(ids=token_ids),
        sampling=generation_pb2.SamplingParams(
            temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True
        ),
        cache_salt=str(time.perf_counter_ns()),
    )
    count = 0
    async for response in stub.Generate(request, timeout=300):
        count += len(response.chunk.token_ids)
    return count


def peer_seconds(model: Any, token_ids: list[list[int]]) -> float:
    """transformers' time for the same tokens."""
    inputs = torch.tensor(token_ids)
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            pad_token_id=0,
        )
    assert out.shape[1] == PROMPT_TOKENS + NUM_TOKENS
    return time.perf_counter() - began


def interleaved(cases: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every repeat of every case; the cases of a repeat run one after the other, in an
    order that is drawn anew each time. The first repeat warms up and is dropped."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    order = list(cases)
    for repeat in range(repeats + 1):
        random.Random(repeat).shuffle(order)
        for name in order:
            taken = cases[name]()
            if repeat:
                seconds[name].append(taken)
    return seconds


def cases_of(cluster: Cluster, wanted: list[list[int]]) -> dict[str, Callable[[], float]]:
    """One stream, and all of them together."""
    return {
        f"{cluster.name} single": lambda: asyncio.run(generate(cluster.grpc, wanted[:1])),
        f"{cluster.name} batch": lambda: asyncio.run(generate(cluster.grpc, wanted)),
    }


Rates = dict[str, list[float]]


def rates_of(seconds: dict[str, list[float]]) -> Rates:
    """Tokens per second of every repeat."""
    return {
        name: [NUM_TOKENS * (NUM_STREAMS if name.endswith("batch") else 1) / t for t in taken]
        for name, taken in seconds.items()
    }


def against_peer(rates: Rates) -> list[BenchmarkRow]:
    """The bars against transformers, in tokens per second."""
    return [
        _row("1x1 single / transformers single", rates, "1x1 single", "peer single", 1.1),
        _row("1x1 8 streams / transformers batch 8", rates, "1x1 batch", "peer batch", 1.0),
        _row("1x1 8 streams / transformers single", rates, "1x1 batch", "peer single", 3.0),
    ]


def against_one_rank(name: str, rates: Rates, bar: float | None) -> list[BenchmarkRow]:
    """A striped worker against our own single rank."""
    return [
        _row(f"{name} single / 1x1 single", rates, f"{name} single", "1x1 single", bar),
        _row(f"{name} 8 streams / 1x1", rates, f"{name} batch", "1x1 batch", None),
    ]


def _row(case: str, rates: Rates, ours: str, peer: str, bar: float | None) -> BenchmarkRow:
    """Median rates, and the median over the repeats of the ratio within one: the speed of a shared
    machine drifts from one repeat to the next."""
    ratio = statistics.median(a / b for a, b in zip(rates[ours], rates[peer], strict=True))
    own, other = statistics.median(rates[ours]), statistics.median(rates[peer])
    return BenchmarkRow(case, own, other, ratio, bar, bar is None or ratio >= bar)


def where_rows(cluster: Cluster, wanted: list[list[int]]) -> list[BenchmarkRow]:
    """Milliseconds of one token on the wire against the engine's own step."""
    before = cluster.step_seconds()
    seconds = asyncio.run(generate(cluster.grpc, wanted[:1]))
    after = cluster.step_seconds()
    step_ms = 1e3 * (after[0] - before[0]) / (after[1] - before[1])
    token_ms = 1e3 * seconds / NUM_TOKENS
    case = f"where: {cluster.name}, engine step / time a token end to end (ms)"
    return [BenchmarkRow(case, step_ms, token_ms, step_ms / token_ms, None, True)]


def main() -> int:
    """Measure, print and write; exit code 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--repeats", type=int, default=5, help="measured repeats [5]")
    options = parser.parse_args()
    model = load_reference_model(options.model)
    wanted = prompts(model.config.vocab_size)
    peer = {
        "peer single": lambda: peer_seconds(model, wanted[:1]),
        "peer batch": lambda: peer_seconds(model, wanted),
    }
    # Only what is compared is alive: idle workers take a little of the cores as well.
    with running_cluster(options.model, "1x1", "tp=1,dcp=1") as single:
        ours = cases_of(single, wanted)
        rows = against_peer(rates_of(interleaved(peer | ours, options.repeats)))
        rows += where_rows(single, wanted)
        for name, decode, bar in STRIPED:
            with running_cluster(options.model, name, decode) as striped:
                both = ours | cases_of(striped, wanted)
                rates = rates_of(interleaved(both, options.repeats))
                rows += against_one_rank(name, rates, bar) + where_rows(striped, wanted)
    for row in rows:
        verdict = "holds" if row.holds else "MISSED"
        against = "" if row.bar is None else f" (bar {row.bar}: {verdict})"
        sys.stdout.write(
            f"{row.case}: {row.ours:.2f} / {row.peer:.2f} = {row.ratio:.3f}{against}\n"
        )
    if options.json:
        write_report(options.json, "cpu_decode", rows)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
