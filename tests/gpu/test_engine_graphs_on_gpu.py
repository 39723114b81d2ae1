"""Decode and verify steps of the engine in CUDA graphs: the same as eager ones.

Steps of one rank first, with NaN wherever nothing was written; then engines of real rank processes,
whose batches shrink and grow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attention.backends.triton_backend import TritonBackend
from attention.single_group import SingleGroup
from kvbraid.engine.captured_forward import CapturedForward
from kvbraid.engine.cuda_graph import CudaGraphCapture
from kvbraid.engine.step_forward import EagerForward
from kvbraid.request import SamplingParams
from tests.unit.engine.forward_script import CAPTURED, LIMITS, build, check_equal, play
from tools.engine_case import Case, Prompt
from tools.engine_world import EngineWorld

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]

ASSETS = Path(__file__).parents[1] / "assets"
MODEL = str(ASSETS / "tiny-mla")
DRAFTERS = {
    "plain": "",
    "dspark": str(ASSETS / "tiny-mla-dspark"),
    "eagle3": str(ASSETS / "tiny-mla-eagle3"),
}
LAYOUTS = [(1, 1)] + ([(2, 1), (2, 2)] if torch.cuda.device_count() > 1 else [])
NUM_TOKENS = 16


def test_replayed_steps_equal_eager_ones() -> None:
    device = torch.device("cuda", 0)
    groups = (SingleGroup(), SingleGroup())
    eager = build(MODEL, groups, TritonBackend(), EagerForward, device)
    captured = build(
        MODEL,
        groups,
        TritonBackend(),
        lambda rank: CapturedForward(rank, LIMITS, CudaGraphCapture()),
        device,
    )
    play(eager)
    play(captured)
    check_equal(captured, eager, tolerance=1e-3)
    assert isinstance(captured.forward, CapturedForward)
    assert captured.forward.captured == CAPTURED


def phases() -> list[list[Prompt]]:
    """Batches of 1 to 9 that shrink as sequences end; greedy, and drawn in many ways."""
    lines = (ASSETS / "reference" / "tiny-mla-greedy.jsonl").read_text().splitlines()
    rows = [json.loads(line)["prompt_ids"] for line in lines]
    short = sorted((tuple(row) for row in rows if len(row) < 200), key=len)
    samplings = (
        SamplingParams(temperature=0.0, seed=0),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.8, seed=2, top_k=20, top_p=0.9),
    )
    sizes = (9, 1, 4, 2, 6)
    return [
        [
            Prompt(short[(3 * phase + i) % len(short)], NUM_TOKENS + 2 * i, samplings[i % 3])
            for i in range(size)
        ]
        for phase, size in enumerate(sizes)
    ]


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def world(request: pytest.FixtureRequest) -> Iterator[EngineWorld]:
    tp_size, dcp_size = request.param
    with EngineWorld(
        MODEL, tp_size=tp_size, dcp_size=dcp_size, communicator="nccl", device="cuda"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def eager_tokens(world: EngineWorld) -> list[list[list[int]]]:
    return world.run(Case(cuda_graphs="never", exchange="a2a"), phases()).tokens


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_tokens_equal_those_of_eager_steps(
    world: EngineWorld, eager_tokens: list[list[list[int]]], drafter: str
) -> None:
    """float32; 10 sequences at most, so that sizes are 1, 2, 4, 8 and 10."""
    case = Case(
        cuda_graphs="always", exchange="a2a", drafter=drafter, max_draft_tokens=3, max_num_seqs=10
    )
    outcome = world.run(case, phases())
    assert outcome.tokens == eager_tokens
    accepted = sum(window.num_accepted for step in outcome.windows for window in step)
    assert accepted > 20 if drafter else accepted == 0


def test_bfloat16_steps_run() -> None:
    with EngineWorld(
        MODEL, tp_size=1, dcp_size=1, communicator="nccl", device="cuda", dtype="bfloat16"
    ) as world:
        for drafter in (DRAFTERS["plain"], DRAFTERS["dspark"]):
            case = Case(
                cuda_graphs="always",
                drafter=drafter,
                max_draft_tokens=3,
                page_size=64,
                kv_cache_tokens=16384,
            )
            outcome = world.run(case, phases())
            for prompts, answers in zip(phases(), outcome.tokens, strict=True):
                for prompt, tokens in zip(prompts, answers, strict=True):
                    assert 1 <= len(tokens) <= prompt.max_tokens
                    assert all(0 <= token < 4096 for token in tokens)


def test_the_fused_exchange_is_replayed() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with EngineWorld(MODEL, tp_size=2, dcp_size=2, communicator="nccl", device="cuda") as world:
        tokens = [
            world.run(Case(cuda_graphs=graphs, exchange="fused"), phases()).tokens
            for graphs in ("never", "always")
        ]
    assert tokens[0] == tokens[1]
