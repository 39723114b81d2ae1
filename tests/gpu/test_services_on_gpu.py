"""The real services on CUDA: the same processes, weights and pools on a GPU, float32.

Prefill and decode workers share the GPUs there are; greedy tokens must be the reference's up to
its near ties, as on CPU.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest
import torch

from kvbraid.cluster.local_cluster import ClusterSpec, LocalCluster
from kvbraid.cluster.worker_spec import WorkerSpec
from kvbraid.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    generation_pb2,
    info_pb2,
    info_pb2_grpc,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]

ASSETS = Path(__file__).parents[1] / "assets"
NEAR_TIE = 4e-4
NUM_TOKENS = 32
TWO_GPUS = [(2, 1, "a2a"), (2, 2, "a2a"), (2, 2, "fused")]
TOPOLOGIES = [(1, 1, "a2a")] + (TWO_GPUS if torch.cuda.device_count() > 1 else [])


def reference_rows() -> list[dict]:
    lines = (ASSETS / "reference" / "tiny-mla-greedy.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


async def answer(stub, row: dict) -> list[int]:
    request = coordinator_pb2.GenerateRequest(
        prompt_ids=coordinator_pb2.TokenIds(ids=row["prompt_ids"]),
        sampling=generation_pb2.SamplingParams(
            temperature=0.0, max_tokens=min(NUM_TOKENS, len(row["output_ids"]))
        ),
    )
    tokens: list[int] = []
    async for response in stub.Generate(request, timeout=120):
        tokens += response.chunk.token_ids
    return tokens


async def answers_and_backend(cluster: LocalCluster) -> tuple[list[list[int]], str]:
    async with grpc.aio.insecure_channel(cluster.coordinator.grpc) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        answers = await asyncio.gather(*(answer(stub, row) for row in reference_rows()))
    async with grpc.aio.insecure_channel(cluster.workers["decode-0"].grpc) as channel:
        info = await info_pb2_grpc.InfoServiceStub(channel).Info(info_pb2.InfoRequest(), timeout=10)
    return list(answers), info.attention_backend


@pytest.mark.parametrize(("tp_size", "dcp_size", "exchange"), TOPOLOGIES)
def test_greedy_tokens_equal_the_reference_in_float32(
    tmp_path: Path, tp_size: int, dcp_size: int, exchange: str
) -> None:
    common = "dtype=float32,kv_cache_tokens=16384,device=auto"
    spec = ClusterSpec(
        model=str(ASSETS / "tiny-mla"),
        prefill=(WorkerSpec.parse("prefill", f"tp=1,dcp=1,{common}"),),
        decode=(
            WorkerSpec.parse("decode", f"tp={tp_size},dcp={dcp_size},exchange={exchange},{common}"),
        ),
        coordinator=("--local-prefill-max-tokens=0",),
    )
    with LocalCluster(spec, tmp_path) as cluster:
        cluster.start(timeout_s=100)
        answers, backend = asyncio.run(answers_and_backend(cluster))
        cluster.check()  # a worker that died would be made up for by the others
    assert backend == "triton"
    for row, tokens in zip(reference_rows(), answers, strict=True):
        ties = [i for i, gap in enumerate(row["gaps"]) if gap < NEAR_TIE]
        n = min([*ties, len(tokens), NUM_TOKENS])
        assert tokens[:n] == row["output_ids"][:n], f"prompt {row['id']}"
