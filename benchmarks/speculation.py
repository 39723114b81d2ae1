"""Decoding with drafts against plain decoding, side by side through the real services.

python -m benchmarks.speculation --model DIR --drafter DIR [--drafter DIR] --prompts FILE.jsonl \
    --json benchmarks/results/speculation_cpu.json

Two `kvbraid up` of one layout, one with a drafter in its workers; each prompt is sent to both, one
after the other, the first of a pair in turn; the median of the ratios within a pair counts. The
tokens of a pair must be equal. Prompts are rendered by the chat template and decoded greedily.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.report import BenchmarkRow, write_report
from kvbraid.cluster.local_cluster import ClusterSpec, LocalCluster
from kvbraid.cluster.worker_spec import WorkerSpec
from kvbraid.v1 import coordinator_pb2, coordinator_pb2_grpc, generation_pb2

# The first pair warms up and is dropped.
NUM_WARMUP = 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One batch of streams: its tokens, seconds, and drafts verified and accepted."""

    tokens: tuple[tuple[int, ...], ...]
    seconds: float
    num_drafts: int
    num_accepted: int


@contextmanager
def running_cluster(model: str, decode: str, drafter: str) -> Iterator[str]:
    """The gRPC address of a cluster's coordinator."""
    spec = ClusterSpec(
        model=model,
        prefill=(WorkerSpec.parse("prefill", "tp=1,dcp=1,kv_cache_tokens=8192"),),
        decode=(WorkerSpec.parse("decode", f"{decode},kv_cache_tokens=8192"),),
        drafter=drafter,
    )
    with LocalCluster(spec) as cluster:
        cluster.start(timeout_s=300)
        yield cluster.coordinator.grpc


async def generate(target: str, prompts: Sequence[str], max_tokens: int) -> Sample:
    """All prompts at once, under a fresh salt so that nothing is cached."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        await channel.channel_ready()
        began = time.perf_counter()
        streams = await asyncio.gather(*(_one(stub, text, max_tokens) for text in prompts))
        seconds = time.perf_counter() - began
    return Sample(
        tuple(tokens for tokens, _ in streams),
        seconds,
        sum(usage.num_draft_tokens for _, usage in streams),
        sum(usage.num_accepted_tokens for _, usage in streams),
    )


async def _one(
    stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub, text: str, max_tokens: int
) -> tuple[tuple[int, ...], generation_pb2.Usage]:
    request = coordinator_pb2.GenerateRequest(
        chat=coordinator_pb2.ChatMessages(
            messages=[coordinator_pb2.ChatMessage(role="user", content=text)]
        ),
        sampling=generation_pb2.SamplingParams(temperature=0, max_tokens=max_tokens),
        cache_salt=str(time.perf_counter_ns()),
    )
    tokens: list[int] = []
    usage = generation_pb2.Usage()
    async for response in stub.Generate(request, timeout=300):
        tokens += response.chunk.token_ids
        if response.HasField("usage"):
            usage = response.usage
    return tuple(tokens), usage


def pairs(
    plain: str, drafted: str, prompts: Sequence[str], batch: int, repeats: int, max_tokens: int
) -> list[tuple[Sample, Sample]]:
    """(plain, drafted) for each repeat, which takes the next `batch` prompts.

    Raises ValueError where the two do not emit the same tokens.
    """
    found = []
    for repeat in range(NUM_WARMUP + repeats):
        texts = [prompts[(repeat * batch + i) % len(prompts)] for i in range(batch)]
        order = (plain, drafted) if repeat % 2 else (drafted, plain)
        taken = {t: asyncio.run(generate(t, texts, max_tokens)) for t in order}
        if taken[plain].tokens != taken[drafted].tokens:
            raise ValueError(f"drafts changed the tokens of {texts}")
        if repeat >= NUM_WARMUP:
            found.append((taken[plain], taken[drafted]))
    return found


def rows_of(
    case: str, found: Sequence[tuple[Sample, Sample]], bar: float | None
) -> list[BenchmarkRow]:
    """Tokens a second, and accepted drafts a verified one."""

    def rate(sample: Sample) -> float:
        return sum(map(len, sample.tokens)) / sample.seconds

    ratio = statistics.median(rate(drafted) / rate(plain) for plain, drafted in found)
    ours = statistics.median(rate(drafted) for _, drafted in found)
    peer = statistics.median(rate(plain) for plain, _ in found)
    num_drafts = sum(drafted.num_drafts for _, drafted in found)
    num_accepted = sum(drafted.num_accepted for _, drafted in found)
    share = num_accepted / max(1, num_drafts)
    holds = bar is None or ratio >= bar
    return [
        BenchmarkRow(f"{case} / plain (tokens/s)", ours, peer, ratio, bar, holds),
        BenchmarkRow(
            f"{case}: accepted / verified drafts", num_accepted, num_drafts, share, None, True
        ),
    ]


def main() -> int:
    """Measure, print and write; exit code 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="target folder")
    parser.add_argument("--drafter", action="append", required=True, help="drafter folder")
    parser.add_argument("--bar", type=float, default=1.15, help="of the first drafter, batch 1")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with `prompt`")
    parser.add_argument("--decode", default="tp=1,dcp=1", help="decode worker [tp=1,dcp=1]")
    parser.add_argument("--batch", type=int, action="append", help="streams at once [1 and 8]")
    parser.add_argument("--repeats", type=int, default=10, help="measured pairs [10]")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of a stream [96]")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in options.prompts.read_text().splitlines()]
    rows: list[BenchmarkRow] = []
    for number, drafter in enumerate(options.drafter):
        with ExitStack() as stack:
            plain = stack.enter_context(running_cluster(options.model, options.decode, ""))
            drafted = stack.enter_context(running_cluster(options.model, options.decode, drafter))
            for batch in options.batch or (1, 8):
                found = pairs(plain, drafted, prompts, batch, options.repeats, options.max_tokens)
                bar = options.bar if (number, batch) == (0, 1) else None
                rows += rows_of(f"{Path(drafter).name} x{batch}", found, bar)
    for row in rows:
        verdict = (
            "" if row.bar is None else f" (bar {row.bar}: {'holds' if row.holds else 'MISSED'})"
        )
        sys.stdout.write(
            f"{row.case}: {row.ours:.2f} / {row.peer:.2f} = {row.ratio:.3f}{verdict}\n"
        )
    if options.json:
        write_report(options.json, "speculation", rows)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
