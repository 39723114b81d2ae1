"""`python -m prefill_service`: one prefill worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvbraid.rpc.lifecycle import run_service
from kvbraid.rpc.server import RpcServer
from kvbraid.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server
from kvbraid.worker.worker import Worker
from kvbraid.worker.worker_process import run_worker
from prefill_service.config import PrefillConfig
from prefill_service.servicer import PrefillServicer
from prefill_service.worker import PrefillWorker


def _add_services(server: RpcServer, worker: Worker) -> None:
    server.add(
        add_PrefillServiceServicer_to_server,
        PrefillServicer(PrefillWorker(worker)),
        "kvbraid.v1.PrefillService",
    )


async def _serve(config: PrefillConfig) -> int:
    return await run_worker(config, "prefill", "prefill_service", _add_services)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker until a signal; returns the exit code."""
    return run_service(PrefillConfig, "prefill", _serve, argv)


if __name__ == "__main__":
    sys.exit(main())
