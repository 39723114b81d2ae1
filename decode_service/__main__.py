"""`python -m decode_service`: one decode worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from decode_service.config import DecodeConfig
from decode_service.servicer import DecodeServicer
from decode_service.worker import DecodeWorker
from kvbraid.rpc.lifecycle import run_service
from kvbraid.rpc.server import RpcServer
from kvbraid.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from kvbraid.worker.worker import Worker
from kvbraid.worker.worker_process import run_worker


def _add_services(server: RpcServer, worker: Worker) -> None:
    server.add(
        add_DecodeServiceServicer_to_server,
        DecodeServicer(DecodeWorker(worker)),
        "kvbraid.v1.DecodeService",
    )


async def _serve(config: DecodeConfig) -> int:
    return await run_worker(config, "decode", "decode_service", _add_services)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker until a signal; returns the exit code."""
    return run_service(DecodeConfig, "decode", _serve, argv)


if __name__ == "__main__":
    sys.exit(main())
