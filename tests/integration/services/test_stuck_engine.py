"""An engine that gets nowhere while every process of its worker lives: heartbeats cannot see it."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

SHORT = 6  # 6 prompt tokens, 128 greedy tokens
# Heartbeats that would end the worker wait for ten minutes.
DECODE = "tp=2,dcp=2,heartbeat_seconds=600,engine_step_timeout_seconds=1"
STEP_AGE = re.compile(r"^kvbraid_engine_step_age_seconds(?:{[^}]*})? (\S+)$", re.MULTILINE)


async def is_healthy(channel: grpc.aio.Channel, name: str) -> bool:
    request = health_pb2.HealthCheckRequest(service=name)
    answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def step_age_s(metrics: str) -> float:
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as answer:
        (text,) = STEP_AGE.findall(answer.read().decode())
    return float(text)


async def test_a_stuck_engine_is_not_live_and_its_requests_go_on_elsewhere(
    cluster_of: Callable, support, references, tmp_path: Path
) -> None:
    reference = references[SHORT]
    with cluster_of(tmp_path, decode=(DECODE,) * 2) as cluster:
        async with support.client(cluster.coordinator.grpc) as client:
            tokens, lost, hung = [], "", 0
            call = client.start(reference.prompt_ids, len(reference.output_ids))
            async for token in client.tokens(call):
                tokens.append(token)
                if len(tokens) == 10:
                    lost = await support.busy_worker(cluster, "decode")
                    (rank,) = psutil.Process(cluster.children[lost].pid).children()
                    hung = rank.pid
                    os.kill(hung, signal.SIGSTOP)
            assert tokens == reference.output_ids
        stuck = cluster.workers[lost]
        async with grpc.aio.insecure_channel(stuck.grpc) as channel:
            for name in ("", "decode", "live"):
                assert not await is_healthy(channel, name), name
            assert step_age_s(stuck.metrics) > 1
            log = cluster.children[lost].log_path.read_text()
            assert "the engine is stuck" in log
            assert "step_channel.py" in log or "rank_executor.py" in log, "where it is stuck"
            os.kill(hung, signal.SIGCONT)
            for name in ("", "decode", "live"):

                async def has_recovered(name: str = name) -> bool:
                    return await is_healthy(channel, name)

                await support.wait_for(has_recovered, 20, f"{name} is healthy again")
        await support.leak_free([stuck.grpc])

        async def is_idle() -> bool:
            return step_age_s(stuck.metrics) < 1

        await support.wait_for(is_idle, 10, "the metric follows")
