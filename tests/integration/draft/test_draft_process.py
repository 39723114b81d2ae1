"""`python -m draft_service` with trained drafters: serves, drafts, drains, dies and comes back."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvbraid.model.loader import load_config, model_digest
from kvbraid.rpc.ready import ReadyReport, read_ready
from kvbraid.speculative.drafter_digest import drafter_digest
from kvbraid.speculative.drafter_source import open_drafter
from kvbraid.speculative.proposal import DraftTask, Proposal, Resync
from kvbraid.transport.draft_terms import DraftPeer
from kvbraid.v1 import info_pb2, info_pb2_grpc

ASSETS = Path(__file__).parents[2] / "assets"
TARGET = ASSETS / "tiny-mla"
KINDS = ("dspark", "eagle3")

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(*flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "draft_service", f"--model={TARGET}"]
        own = (f"--ready-file={tmp_path}/ready", "--compute-threads=1", "--draft-kv-tokens=2048")
        process = subprocess.Popen([*command, *own, *flags], stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


async def ready(process: subprocess.Popen[str], path: Path) -> ReadyReport:
    async with asyncio.timeout(100):
        while (report := read_ready(path / "ready")) is None or report.pid != process.pid:
            assert process.poll() is None
            await asyncio.sleep(0.02)
        return report


def peer_of(kind: str) -> DraftPeer:
    config = load_config(TARGET)
    opened = open_drafter(ASSETS / f"tiny-mla-{kind}", config)
    digest = drafter_digest(opened)
    return DraftPeer(5, model_digest(TARGET), digest, config.vocab_size, 3)


def metrics_of(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
        return str(response.read().decode())


def patient() -> Callable[[], float]:
    """A clock by which steps are long, so that one may wait for drafts as long as the limit says:
    these are really computed."""
    return partial(next, count(0.0, 1.0))


def task_of(first: int, num: int, hidden_size: int, **more: Any) -> DraftTask:
    generator = torch.Generator().manual_seed(first)
    rows = torch.randn(num, hidden_size, generator=generator)
    ids = tuple(range(10, 10 + num))
    return DraftTask("a", first, rows, ids, ids[-1], 3, **more)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_trained_drafter_serves_drafts_and_drains(
    kind: str, start: Start, tmp_path: Path, draft: Any
) -> None:
    process = start(f"--drafter={ASSETS}/tiny-mla-{kind}")
    report = await ready(process, tmp_path)
    peer = peer_of(kind)
    width = open_drafter(ASSETS / f"tiny-mla-{kind}", load_config(TARGET)).config.hidden_size
    async with draft.target(report.grpc, peer=peer, clock=patient()) as target:
        await target.connected()
        (first,) = await target.step(task_of(0, 5, width))
        assert isinstance(first, Proposal)
        assert len(first.token_ids) == 3
        assert all(0 <= token_id < peer.vocab_size for token_id in first.token_ids)
        assert await target.step(task_of(0, 5, width)) == [first], "rows replace, so nothing drifts"
        assert await target.step(task_of(9, 1, width)) == [Resync(5)]
        async with grpc.aio.insecure_channel(report.grpc) as channel:
            stub: Any = info_pb2_grpc.InfoServiceStub(channel)
            info = await stub.Info(info_pb2.InfoRequest(), timeout=10)
            health: Any = health_pb2_grpc.HealthStub(channel)
            status = await health.Check(health_pb2.HealthCheckRequest(service="draft"), timeout=10)
        assert (info.role, info.model, info.HasField("layout")) == (
            "draft", f"tiny-mla-{kind}", False
        )  # fmt: skip
        assert (info.model_digest, info.num_pool_tokens, info.num_running) == (
            peer.drafter_digest, 2048, 1
        )  # fmt: skip
        assert status.status == health_pb2.HealthCheckResponse.SERVING
        text = await asyncio.to_thread(metrics_of, report.metrics)
        assert "kvbraid_draft_proposed_tokens_total 6.0" in text
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 10) == 0, "no stream keeps it"
        await target.away()
        assert await target.step(task_of(0, 5, width)) == [None]


@pytest.mark.parametrize("wire", ["local_socket", "tcp", "grpc"])
async def test_a_killed_service_costs_steps_and_a_new_one_is_used(
    wire: str, start: Start, tmp_path: Path, draft: Any
) -> None:
    drafter = f"--drafter={ASSETS}/tiny-mla-dspark"
    process = start(drafter)
    report = await ready(process, tmp_path)
    width = open_drafter(ASSETS / "tiny-mla-dspark", load_config(TARGET)).config.hidden_size
    async with draft.target(report.grpc, peer=peer_of("dspark"), clock=patient()) as target:
        await target.connected()
        (before,) = await target.step(task_of(0, 5, width))
        process.kill()
        await target.away()
        assert await target.step(task_of(5, 1, width)) == [None]
        again = start(drafter, f"--port={report.grpc.rpartition(':')[2]}")
        await ready(again, tmp_path)
        await target.connected()
        assert await target.step(task_of(5, 1, width)) == [Resync(0)]
        assert await target.step(task_of(0, 5, width)) == [before]


def test_a_drafter_of_another_target_is_refused_with_every_reason(
    start: Start, tmp_path: Path
) -> None:
    source = ASSETS / "tiny-mla-dspark"
    text = (source / "config.json").read_text()
    copy = tmp_path / "drafter"
    copy.mkdir()
    (copy / "model.safetensors").symlink_to(source / "model.safetensors")
    values = load_config(TARGET)
    changed = json.loads(text) | {"vocab_size": values.vocab_size + 1, "target_layer_ids": [77]}
    (copy / "config.json").write_text(json.dumps(changed))
    process = start(f"--drafter={copy}")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "vocab_size" in err
    assert "[77]" in err
    assert err.count("\n") == 1
