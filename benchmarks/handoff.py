"""Handoff under load: bytes a second, time to hand over a prompt, event-loop lag meanwhile.

python -m benchmarks.handoff --model DIR --json benchmarks/results/handoff.json

Prompts of 1400 tokens go from a prefill (1,1) to a decode worker (2,2), one after the other and
four at a time, by shared memory and by gRPC push. Lag is what every process's own sampler saw in
that time (p99 bar: 20 ms).
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
import urllib.request
from pathlib import Path

import torch

from benchmarks.clusters import open_channel
from benchmarks.report import BenchmarkRow, write_report
from kvbraid.cluster.local_cluster import ClusterSpec, LocalCluster
from kvbraid.cluster.worker_spec import WorkerSpec
from kvbraid.model.loader import load_config
from kvbraid.v1 import coordinator_pb2, coordinator_pb2_grpc, generation_pb2

PROMPT_TOKENS = 1400
NUM_PROMPTS = 4
LAG_BAR_S = 0.02


def samples(address: str, name: str) -> dict[str, float]:
    """Samples of one metric family, by their label text."""
    text = urllib.request.urlopen(f"http://{address}/metrics").read().decode()
    found = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def lag_p99(before: dict[str, float], after: dict[str, float]) -> float:
    """Upper bound of the bucket that holds the 99th percentile of the lag between two readings."""
    counts = sorted(
        (float(label.split('"')[1]), after[label] - before.get(label, 0.0)) for label in after
    )
    total = counts[-1][1]
    return next(bound for bound, count in counts if count >= 0.99 * total)


async def send(target: str, prompts: list[list[int]], at_once: int) -> None:
    """Two tokens of every prompt, `at_once` prompts at a time."""
    async with open_channel(target) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        slots = asyncio.Semaphore(at_once)

        async def one(ids: list[int]) -> None:
            request = coordinator_pb2.GenerateRequest(
                prompt_ids=coordinator_pb2.TokenIds(ids=ids),
                sampling=generation_pb2.SamplingParams(temperature=0, max_tokens=2),
                cache_salt=str(time.perf_counter_ns()),
            )
            async with slots:
                async for _ in stub.Generate(request, timeout=600):
                    pass

        await asyncio.gather(*(one(ids) for ids in prompts))


def measure(model: str, mover: str, at_once: int) -> list[BenchmarkRow]:
    """One mover at one concurrency."""
    common = f"kv_cache_tokens=16384,kv_mover={mover}"
    spec = ClusterSpec(
        model=model,
        prefill=(WorkerSpec.parse("prefill", f"tp=1,dcp=1,{common}"),),
        decode=(WorkerSpec.parse("decode", f"tp=2,dcp=2,{common}"),),
        coordinator=("--local-prefill-max-tokens=0",),
    )
    vocab = load_config(model).vocab_size
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(100, vocab, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    with LocalCluster(spec) as cluster:
        cluster.start(timeout_s=300)
        reports = {"coordinator": cluster.coordinator, **cluster.workers}
        lag = "kvbraid_process_loop_lag_seconds_bucket"
        before = {name: samples(r.metrics, lag) for name, r in reports.items()}
        asyncio.run(send(cluster.coordinator.grpc, prompts, at_once))
        after = {name: samples(r.metrics, lag) for name, r in reports.items()}
        prefill = cluster.workers["prefill-0"].metrics
        sent = sum(samples(prefill, "kvbraid_handoff_bytes_total").values())
        seconds = sum(samples(prefill, "kvbraid_handoff_duration_seconds_sum").values())
    name = f"{mover}, {at_once} at a time"
    rows = [
        BenchmarkRow(
            f"{name}: MB handed over a request / ms from its last chunk to the last ack",
            sent / NUM_PROMPTS / 1e6,
            1e3 * seconds / NUM_PROMPTS,
            sent / NUM_PROMPTS / 1e6 / (1e3 * seconds / NUM_PROMPTS),
            None,
            True,
        )
    ]
    for process in reports:
        p99 = lag_p99(before[process], after[process])
        ratio = p99 / LAG_BAR_S
        rows.append(
            BenchmarkRow(
                f"{name}: loop lag p99 of {process} (s)", p99, LAG_BAR_S, ratio, 1.0, ratio <= 1
            )
        )
    return rows


def main() -> int:
    """Measure, print and write; exit code 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    rows: list[BenchmarkRow] = []
    for mover in ("shared_memory", "grpc_push"):
        for at_once in (1, 4):
            rows += measure(options.model, mover, at_once)
    for row in rows:
        sys.stdout.write(f"{row.case}: {row.ours:.4g} / {row.peer:.4g} = {row.ratio:.3f}\n")
    if options.json:
        write_report(options.json, "handoff", rows)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
