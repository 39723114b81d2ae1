"""Every role as a process on ::1: handoff, ranks, drafts and metrics."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbraid.rpc.ready import ReadyReport
from kvbraid.testing.loopback import has_ipv6

pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")

PROMPT = 58  # 1289 prompt tokens, 128 greedy tokens
DRAFTER = Path(__file__).parents[2] / "assets" / "tiny-mla-dspark"
# Drafts that a slow machine makes too late at start-up would keep its first prompts from them.
PATIENT = "draft_wire=grpc,draft_policy=fixed,draft_timeout_ms=20000,draft_timeout_fraction=100"
SENT_ROWS = "kvbraid_speculation_sent_rows_total"


def metrics_of(report: ReadyReport) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{report.metrics}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


async def test_a_handed_off_and_drafted_request_over_ipv6(
    cluster_of: Callable, support, references, tmp_path: Path
) -> None:
    reference = references[PROMPT]
    with cluster_of(
        tmp_path,
        prefill=("tp=1,dcp=1,kv_mover=grpc_push,host=::1",),
        decode=(f"tp=2,dcp=2,host=::1,{PATIENT}",),
        coordinator=("--host=::1",),
        draft=(f"drafter={DRAFTER},host=::1,open_wait_ms=60000,ingest_wait_ms=5000",),
    ) as cluster:
        for report in (cluster.coordinator, *cluster.workers.values()):
            assert all(a.startswith("[::1]:") for a in (report.grpc, report.metrics)), report
        async with support.client(cluster.coordinator.grpc) as client:
            tokens = await client.all_tokens(reference.prompt_ids, 24)
            assert tokens == reference.output_ids[:24]
        decode, prefill = (cluster.workers[f"{role}-0"] for role in ("decode", "prefill"))
        assert metrics_of(decode)['kvbraid_rank_up{rank="1"}'] == 1
        pushed = 'kvbraid_handoff_bytes_total{direction="out",mover="grpc_push"}'
        assert metrics_of(prefill)[pushed] > 0

        # The service's word that it has them can come behind the answer.
        async def have_come() -> bool:
            return metrics_of(prefill)[SENT_ROWS] == len(reference.prompt_ids)

        await support.wait_for(have_come, 20, "the prompt's rows are with the drafter")
