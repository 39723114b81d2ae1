"""The real services on CUDA: the same processes, weights and pools on a GPU.

Prefill and decode workers share the GPUs there are. Greedy tokens must be those of the float32
reference; where one differs, the reference's two best logits must be so close there that the
precision explains it, and the answer is asked for again from behind that token.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
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
TINY_MLA = ASSETS / "tiny-mla"
# Folder of model.gguf, 98 MB: too large for the source tree.
SMOLLM2 = os.environ.get("SMOLLM2", "")
# Largest gap of the reference's two best logits where another token may be taken. bfloat16:
# benchmarks/results/gpu_fidelity_*.json has 0.11 and 0.23 at most, where transformers in bfloat16
# differs from itself by more than that in an average step.
NEAR_TIES = {"float32": 4e-4, "bfloat16": 0.5}
NUM_TOKENS = 32
TWO_GPUS = [(2, 1, "a2a"), (2, 2, "a2a"), (2, 2, "fused")]
TOPOLOGIES = [(1, 1, "a2a")] + (TWO_GPUS if torch.cuda.device_count() > 1 else [])
# Every step waits for its drafts, also while kernels are compiled, and verifies all of them.
PATIENT = "draft_policy=fixed,draft_timeout_ms=20000,draft_timeout_fraction=100"


@dataclass(frozen=True)
class Compared:
    """An answer along the reference. gaps: of the reference where ours took another token."""

    gaps: list[float]
    num_tokens: int
    num_drafts: int
    num_accepted: int


def reference_rows(name: str) -> list[dict]:
    lines = (ASSETS / "reference" / f"{name}-greedy.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def spec_of(
    model: Path | str, dtype: str, decode: str = "tp=1,dcp=1", **more: object
) -> ClusterSpec:
    common = f"dtype={dtype},kv_cache_tokens=16384,device=auto"
    return ClusterSpec(
        model=str(model),
        prefill=(WorkerSpec.parse("prefill", f"tp=1,dcp=1,{common}"),),
        decode=(WorkerSpec.parse("decode", f"{decode},{common}"),),
        coordinator=("--local-prefill-max-tokens=0",),
        **more,
    )


async def answer(stub, prompt: list[int], max_tokens: int) -> tuple[list[int], list[int]]:
    """Tokens, and (drafts verified, accepted)."""
    request = coordinator_pb2.GenerateRequest(
        prompt_ids=coordinator_pb2.TokenIds(ids=prompt),
        sampling=generation_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens),
    )
    tokens: list[int] = []
    drafts = [0, 0]
    async for response in stub.Generate(request, timeout=120):
        tokens += response.chunk.token_ids
        for window in response.chunk.windows:
            drafts[0] += window.num_draft_tokens
            drafts[1] += window.num_accepted_tokens
    return tokens, drafts


async def compared(stub, row: dict) -> Compared:
    expected = row["output_ids"][:NUM_TOKENS]
    gaps, drafts, done = [], [0, 0], 0
    while done < len(expected):
        left = expected[done:]
        tokens, given = await answer(stub, row["prompt_ids"] + expected[:done], len(left))
        drafts = [a + b for a, b in zip(drafts, given, strict=True)]
        pairs = enumerate(zip(tokens, left, strict=False))
        same = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
        if same is None and len(tokens) == len(left):
            break
        done += len(tokens) if same is None else same
        gaps.append(row["gaps"][done])
        done += 1
    return Compared(gaps, len(expected), *drafts)


async def compared_rows(cluster: LocalCluster, rows: list[dict]) -> tuple[list[Compared], str]:
    async with grpc.aio.insecure_channel(cluster.coordinator.grpc) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        found = await asyncio.gather(*(compared(stub, row) for row in rows))
    async with grpc.aio.insecure_channel(cluster.workers["decode-0"].grpc) as channel:
        info = await info_pb2_grpc.InfoServiceStub(channel).Info(info_pb2.InfoRequest(), timeout=10)
    return list(found), info.attention_backend


def check_served(spec: ClusterSpec, rows: list[dict], dtype: str, folder: Path) -> list[Compared]:
    with LocalCluster(spec, folder) as cluster:
        cluster.start(timeout_s=110)
        found, backend = asyncio.run(compared_rows(cluster, rows))
        cluster.check()  # a worker that died would be made up for by the others
    assert backend == "triton"
    for row, one in zip(rows, found, strict=True):
        assert all(gap < NEAR_TIES[dtype] for gap in one.gaps), f"prompt {row['id']}: {one}"
    # Ties are the exception also where they are allowed.
    assert sum(len(one.gaps) for one in found) < 0.2 * sum(one.num_tokens for one in found)
    return found


@pytest.mark.timeout(200)
@pytest.mark.parametrize("dtype", NEAR_TIES)
@pytest.mark.parametrize(("tp_size", "dcp_size", "exchange"), TOPOLOGIES)
def test_greedy_tokens_equal_the_reference(
    tmp_path: Path, tp_size: int, dcp_size: int, exchange: str, dtype: str
) -> None:
    decode = f"tp={tp_size},dcp={dcp_size},exchange={exchange}"
    check_served(spec_of(TINY_MLA, dtype, decode), reference_rows("tiny-mla"), dtype, tmp_path)


@pytest.mark.timeout(200)
@pytest.mark.skipif(not SMOLLM2, reason="SMOLLM2 names no folder with SmolLM2-135M-Instruct")
@pytest.mark.parametrize("dtype", NEAR_TIES)
def test_smollm2_equals_the_reference(tmp_path: Path, dtype: str) -> None:
    check_served(spec_of(SMOLLM2, dtype), reference_rows("smollm2-135m"), dtype, tmp_path)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("where", ["embedded", "remote"])
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_drafts_do_not_change_the_tokens(tmp_path: Path, kind: str, where: str) -> None:
    """Prompts are handed over with their fused rows, and drafts are accepted from then on."""
    drafter = str(ASSETS / f"tiny-mla-{kind}")
    service = WorkerSpec.parse("draft", f"drafter={drafter},dtype=float32,ingest_wait_ms=10000")
    drafts: dict[str, object] = (
        {"drafter": drafter} if where == "embedded" else {"draft": (service,)}
    )
    spec = spec_of(TINY_MLA, "float32", f"tp=1,dcp=1,{PATIENT}", **drafts)
    found = check_served(spec, reference_rows("tiny-mla"), "float32", tmp_path)
    num_drafts = sum(one.num_drafts for one in found)
    assert sum(one.num_accepted for one in found) > 0.2 * num_drafts > 40
