"""A service that loads nothing: `scripted_service.py ROLE --behaviour=... [flags of a service]`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass, field
from typing import Literal

from kvbraid.errors import CheckpointError
from kvbraid.rpc.lifecycle import run_service, run_until_signal
from kvbraid.rpc.ready import ReadyReport, write_ready
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ModelSettings, ParallelSettings, ServerSettings, setting
from kvbraid.telemetry.endpoint import MetricsEndpoint
from kvbraid.telemetry.metrics import WorkerMetrics

ROLE = sys.argv[1]


@dataclass(frozen=True, slots=True)
class ScriptedConfig:
    """What the real services take, as far as the tests need it."""

    server: ServerSettings = field(default_factory=ServerSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    prefill_workers: list[str] = setting([], "Prefill workers.")
    decode_workers: list[str] = setting([], "Decode workers.")
    drafter: str = setting("", "Drafter.")
    draft_worker: str = setting("", "Draft service.")
    tap_fusion: str = setting("", "Drafter of the draft service.")
    http_port: int = setting(0, "HTTP port.")
    behaviour: Literal["serve", "refuse", "ignore_sigterm"] = setting("serve", "What it does.")


async def serve(config: ScriptedConfig) -> int:
    if config.behaviour == "refuse":
        raise CheckpointError("model.safetensors: tensor lm_head.weight is missing")
    metrics = WorkerMetrics(ROLE)
    server = RpcServer(role=ROLE, settings=config.server, metrics=metrics.rpc)
    await server.start()
    await server.set_serving(True)
    with MetricsEndpoint(metrics.registry, host="127.0.0.1", port=0) as endpoint:
        # The coordinator's targets travel in a field that the tests can read.
        http = ";".join([*config.prefill_workers, *config.decode_workers])
        if ROLE in ("prefill", "decode"):
            http = ";".join([config.drafter, config.draft_worker, config.tap_fusion])
        report = ReadyReport(ROLE, os.getpid(), server.address, endpoint.address, http)
        write_ready(config.server.ready_file, report)
        if config.behaviour == "ignore_sigterm":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            await asyncio.Event().wait()
        return await run_until_signal(server)


sys.exit(run_service(ScriptedConfig, ROLE, serve, sys.argv[2:]))
