"""Speculation through the real services: prompts handed over from prefill, drafts embedded and
remote, the tokens those of plain decoding and the accepted counts the reference loop's."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvbraid.cluster.local_cluster import LocalCluster
from tools.chat_prompt import chat_prompt_ids

ASSETS = Path(__file__).parents[2] / "assets"
# Every step waits for its drafts, however slow the machine is, and verifies all of them.
PATIENT = "draft_policy=fixed,draft_timeout_ms=20000,draft_timeout_fraction=100"
DECODE = (f"tp=2,dcp=2,{PATIENT}",)


@dataclass
class Drafted:
    """What one request gave. windows: (drafts verified, drafts accepted) of each step that had
    some."""

    tokens: list[int] = field(default_factory=list)
    windows: list[tuple[int, int]] = field(default_factory=list)
    num_drafts: int = 0
    num_accepted: int = 0


def acceptance_rows() -> list[dict[str, Any]]:
    lines = (ASSETS / "reference" / "tiny-mla-acceptance.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


async def drafted(client: Any, prompt: list[int], max_tokens: int, **sampling: Any) -> Drafted:
    found = Drafted()
    async for response in client.start(prompt, max_tokens, timeout=100, **sampling):
        chunk = response.chunk
        found.tokens += chunk.token_ids
        found.windows += (
            (window.num_draft_tokens, window.num_accepted_tokens)
            for window in chunk.windows
            if window.num_draft_tokens
        )
        if response.HasField("usage"):
            found.num_drafts = response.usage.num_draft_tokens
            found.num_accepted = response.usage.num_accepted_tokens
    return found


@pytest.fixture(scope="module", params=["eagle3", "dspark"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["embedded", "remote"])
def cluster(
    request: pytest.FixtureRequest,
    kind: str,
    cluster_of: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LocalCluster]:
    path = str(ASSETS / f"tiny-mla-{kind}")
    service = f"drafter={path},ingest_wait_ms=10000"
    where = {"drafter": path} if request.param == "embedded" else {"draft": (service,)}
    with cluster_of(tmp_path_factory.mktemp("drafted"), decode=DECODE, **where) as running:
        yield running


async def test_a_handed_over_prompt_is_drafted_for_from_its_first_step(
    cluster: LocalCluster, kind: str, support: Any
) -> None:
    """The rows of the prompt come from the prefill worker: without them acceptance would begin
    low. Both step by step as the reference loop has it, and again from the prefix cache."""
    async with support.client(cluster.coordinator.grpc) as client:
        for row in acceptance_rows()[:2]:
            prompt = chat_prompt_ids(ASSETS / "tiny-mla", row["prompt"])
            plain = await drafted(client, prompt, row["n_output"], max_draft_tokens=0)
            assert plain.num_drafts == 0
            for _ in range(2):
                found = await drafted(client, prompt, row["n_output"])
                assert found.tokens == plain.tokens
                assert found.num_drafts == sum(n for n, _ in found.windows)
                assert found.num_accepted == sum(a for _, a in found.windows)
                full = [a for n, a in found.windows if n == row[kind]["draft_tokens"]]
                assert full == row[kind]["accepted"][: len(full)]
                assert len(full) >= len(row[kind]["accepted"]) - 1


async def test_row_14_a_prompt_of_one_token_is_handed_over(
    cluster: LocalCluster, support: Any
) -> None:
    """sglang 36140: it crashed the decode side, which had nothing to speculate from."""
    async with support.client(cluster.coordinator.grpc) as client:
        plain = await drafted(client, [5], 12, max_draft_tokens=0)
        found = await drafted(client, [5], 12)
        assert found.tokens == plain.tokens
        assert found.num_drafts > 0


async def test_sampling_penalties_stops_and_logprobs_do_not_change(
    cluster: LocalCluster, support: Any
) -> None:
    """vLLM #34497, #44727: log-probabilities of the wrong rows."""
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.9, "seed": 5, "top_logprobs": 3},
        {"temperature": 0.0, "frequency_penalty": 1.5, "logit_bias": {17: 5.0}, "top_logprobs": 1},
        {"temperature": 0.7, "seed": 9, "min_p": 0.05, "stop": ["the"]},
    ]
    prompt = chat_prompt_ids(ASSETS / "tiny-mla", "Tell me a story about a cat.")
    async with support.client(cluster.coordinator.grpc) as client:
        for sampling in samplings:
            outputs = []
            for drafts in ({"max_draft_tokens": 0}, {}, {"max_draft_tokens": 2}):
                call = client.start(prompt, 40, timeout=100, **sampling, **drafts)
                chunks = [r async for r in call]
                outputs.append(
                    (
                        [t for r in chunks for t in r.chunk.token_ids],
                        "".join(r.text for r in chunks),
                        [p.chosen.token_id for r in chunks for p in r.chunk.logprobs],
                        [round(p.chosen.logprob, 3) for r in chunks for p in r.chunk.logprobs],
                        [len(p.top) for r in chunks for p in r.chunk.logprobs],
                    )
                )
            assert outputs[0] == outputs[1] == outputs[2]


async def test_a_draft_service_that_dies_costs_drafts_only(
    cluster_of: Callable[..., Any], support: Any, tmp_path: Path
) -> None:
    path = str(ASSETS / "tiny-mla-dspark")
    decode = ("tp=2,dcp=2,draft_policy=fixed,draft_timeout_ms=2000,draft_timeout_fraction=100",)
    prompt = chat_prompt_ids(ASSETS / "tiny-mla", "Tell me a story about a cat.")
    with cluster_of(tmp_path, decode=decode, draft=(f"drafter={path}",)) as cluster:
        async with support.client(cluster.coordinator.grpc) as client:
            plain = await drafted(client, prompt, 100, max_draft_tokens=0)
            tokens: list[int] = []
            num_drafts = 0
            async for response in client.start(prompt, 100, timeout=100):
                tokens += response.chunk.token_ids
                num_drafts += sum(w.num_draft_tokens for w in response.chunk.windows)
                if num_drafts and cluster.children["draft-0"].is_running:
                    os.kill(cluster.children["draft-0"].pid, signal.SIGKILL)
                    cluster.children["draft-0"].wait(20)
            assert tokens == plain.tokens
            assert num_drafts > 0
            after = await drafted(client, prompt, 20)
            assert after.tokens == plain.tokens[:20]
            assert after.num_drafts == 0
