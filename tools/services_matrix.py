"""Greedy tokens equal transformers' through the real services: a pairwise set of layouts.

python -m tools.services_matrix --model DIR --model DIR --json benchmarks/results/x.json

Each row starts coordinator, prefill and decode workers with its layouts, then sends one prompt
alone, a mixed batch of eight and the longest prompt again on the warm caches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import grpc

from benchmarks.report import BenchmarkRow, write_report
from kvbraid.cluster.local_cluster import ClusterSpec, LocalCluster
from kvbraid.cluster.worker_spec import WorkerSpec
from kvbraid.v1 import coordinator_pb2, coordinator_pb2_grpc, generation_pb2
from tools.equality_matrix import LONG, NUM_TOKENS, References, lengths
from tools.pairwise import Row, pairwise_rows

FACTORS: dict[str, list[object]] = {
    "decode": [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4)],
    "prefill": [(1, 1), (2, 2)],
    "decode_page": [1, 4, 16],
    "prefill_page": [1, 4, 16],
    "interleave": ["1", "page"],
    "chunk": [16, 512],
    "exchange": ["ag_rs", "a2a"],
    "q_mode": ["gather", "replicate"],
    "mover": ["shared_memory", "grpc_push"],
    "communicator": ["shared_memory", "gloo"],
}
NUM_ROWS = 40


def rows_of(models: list[str]) -> list[Row]:
    """At least NUM_ROWS rows that cover every pair of values; the same in every run."""
    factors: dict[str, list[object]] = {"model": list(models), **FACTORS}
    rows = pairwise_rows(factors, seed=1)
    seed = 2
    while len(rows) < NUM_ROWS:
        rows += pairwise_rows(factors, seed=seed)[: NUM_ROWS - len(rows)]
        seed += 1
    return rows


def worker(role: str, row: Row) -> WorkerSpec:
    """A worker of `row`."""
    sizes, page = row[role], int(str(row[f"{role}_page"]))
    assert isinstance(sizes, tuple)
    communicator = row["communicator"] if sizes[0] > 1 else "auto"
    text = (
        f"tp={sizes[0]},dcp={sizes[1]},page_size={page},kv_cache_tokens=2048,poison_kv=true,"
        f"interleave={page if row['interleave'] == 'page' else 1},q_mode={row['q_mode']},"
        f"exchange={row['exchange']},communicator={communicator},kv_mover={row['mover']},"
        f"prefill_chunk_tokens={row['chunk']},threads_per_rank=1"
    )
    return WorkerSpec.parse(role, text)


async def answers(target: str, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Greedy tokens of prompts sent together."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        return list(await asyncio.gather(*(_answer(stub, prompt) for prompt in prompts)))


async def _answer(stub: Any, prompt: tuple[int, ...]) -> list[int]:
    request = coordinator_pb2.GenerateRequest(
        prompt_ids=coordinator_pb2.TokenIds(ids=prompt),
        sampling=generation_pb2.SamplingParams(
            temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True
        ),
    )
    tokens: list[int] = []
    async for response in stub.Generate(request, timeout=300):
        tokens += response.chunk.token_ids
    return tokens


def faults_of(row: Row, references: References) -> list[str]:
    """What is wrong with a row, nothing when all is well."""
    sizes = row["decode"]
    assert isinstance(sizes, tuple)
    wanted = lengths(int(str(row["decode_page"])), sizes[1])
    spec = ClusterSpec(
        model=str(row["model"]),
        prefill=(worker("prefill", row),),
        decode=(worker("decode", row),),
        coordinator=("--local-prefill-max-tokens=0",),
    )
    faults: list[str] = []
    with LocalCluster(spec) as cluster:
        cluster.start(timeout_s=300)
        for phase in ([wanted[4]], wanted, [LONG]):
            prompts = [references.text[:n] for n in phase]
            found = asyncio.run(answers(cluster.coordinator.grpc, prompts))
            faults += [
                f"length {n}: {tokens}, not {references[n].token_ids}"
                for n, tokens in zip(phase, found, strict=True)
                if not references[n].agrees_with(tokens)
            ]
    return faults


def main() -> int:
    """Run every row; exit code 1 when any differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--model", action="append", required=True, help="model folder; repeatable")
    options = parser.parse_args()
    references = {model: References(model) for model in options.model}
    report: list[BenchmarkRow] = []
    began = time.monotonic()
    rows = rows_of(options.model)
    for number, row in enumerate(rows):
        faults = faults_of(row, references[str(row["model"])])
        named = row | {"model": Path(str(row["model"])).name, "faults": faults}
        report.append(BenchmarkRow.equality(json.dumps(named), not faults))
        sys.stdout.write(f"{number + 1}/{len(rows)} {json.dumps(named)}\n")
        sys.stdout.flush()
    failed = [row for row in report if not row.holds]
    sys.stdout.write(f"{len(rows)} rows, {len(failed)} failed, {time.monotonic() - began:.0f} s\n")
    if options.json:
        write_report(options.json, "services_matrix", report)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
