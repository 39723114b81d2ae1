"""`python -m draft_service`: one draft service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Sequence

import torch

from draft_service.batcher import Batcher
from draft_service.config import DraftConfig
from draft_service.drafter import LoadedDrafter, load, model_name
from draft_service.info_servicer import DraftIdentity, DraftInfoServicer
from draft_service.local_door import LocalDoor
from draft_service.servicer import DraftServicer
from draft_service.socket_listener import SocketListener
from draft_service.tcp_door import TcpDoor
from draft_service.worker import DraftWorker
from kvbraid.rpc.lifecycle import run_service, run_until_signal
from kvbraid.rpc.ready import write_ready
from kvbraid.rpc.server import RpcServer
from kvbraid.settled_heap import settle_heap
from kvbraid.telemetry.endpoint import MetricsEndpoint
from kvbraid.telemetry.loop_lag import sample_loop_lag
from kvbraid.telemetry.metrics import DraftServiceMetrics
from kvbraid.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server
from kvbraid.v1.info_pb2_grpc import add_InfoServiceServicer_to_server
from kvbraid.worker.engine_thread import EngineThread

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 5.0


async def _serve(config: DraftConfig) -> int:
    # The compute thread alone computes with more, as in a worker.
    torch.set_num_threads(1)
    loaded = await asyncio.to_thread(load, config, secrets.randbits(63))
    metrics = DraftServiceMetrics()
    batcher = Batcher(
        loaded.proposer,
        window_s=config.draft.batch_window_ms / 1000,
        max_batch=loaded.terms.max_sequences,
        max_chunk_rows=loaded.terms.max_rows_per_message,
        metrics=metrics.draft,
    )
    worker = DraftWorker(
        terms=loaded.terms, settings=config.draft, batcher=batcher, metrics=metrics.draft
    )
    local = SocketListener(LocalDoor(loaded.terms))
    tcp = SocketListener(TcpDoor(config.server, config.draft.step_port))
    server = RpcServer(role="draft", settings=config.server, metrics=metrics.rpc)
    servicer = DraftServicer(
        worker,
        lease_s=config.draft.lease_seconds,
        address=lambda: server.address,
        inbox=batcher.inbox,
        listeners=(local, tcp),
    )
    server.add(add_DraftServiceServicer_to_server, servicer, "kvbraid.v1.DraftService")
    thread = EngineThread(
        batcher.run, asyncio.get_running_loop(), loaded.device, _num_threads(config)
    )
    thread.start()
    try:
        local.start()
        tcp.start()
        return await _run(config, loaded, metrics, server, servicer, thread)
    finally:
        local.close()
        tcp.close()
        batcher.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_GRACE_S):
                await asyncio.shield(thread.finished)


async def _run(
    config: DraftConfig,
    loaded: LoadedDrafter,
    metrics: DraftServiceMetrics,
    server: RpcServer,
    servicer: DraftServicer,
    thread: EngineThread,
) -> int:
    with MetricsEndpoint(
        metrics.registry, host=config.server.host, port=config.server.metrics_port
    ) as endpoint:
        identity = DraftIdentity(model_name(config), loaded.num_kv_tokens, endpoint.address)
        info = DraftInfoServicer(identity, loaded.terms, loaded.proposer)
        server.add(add_InfoServiceServicer_to_server, info, "kvbraid.v1.InfoService")
        await server.start()
        lag = asyncio.create_task(sample_loop_lag(metrics.process.loop_lag_seconds.observe))
        server.admission.on_close(servicer.begin_goodbye)
        settle_heap()
        await server.set_serving(True)
        write_ready(config.server.ready_file, server.ready_report(metrics=endpoint.address))
        logger.info("serving", extra={"address": server.address})
        try:
            return await run_until_signal(server, failure=thread.failure)
        finally:
            lag.cancel()


def _num_threads(config: DraftConfig) -> int:
    return config.draft.compute_threads or len(os.sched_getaffinity(0))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service until a signal; returns the exit code."""
    return run_service(DraftConfig, "draft", _serve, argv)


if __name__ == "__main__":
    sys.exit(main())
