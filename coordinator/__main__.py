"""`python -m coordinator`: the front door as a process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from coordinator.config import CoordinatorConfig
from coordinator.server import CoordinatorServer
from kvbraid.errors import ConfigError
from kvbraid.rpc.lifecycle import run_service, run_until_signal
from kvbraid.rpc.parent import die_with_parent
from kvbraid.rpc.ready import write_ready
from kvbraid.settled_heap import settle_heap
from kvbraid.telemetry.logging import configure_logging
from kvbraid.telemetry.loop_lag import sample_loop_lag
from kvbraid.tokenizer import load_tokenizer

_ROLE = "coordinator"


async def serve(config: CoordinatorConfig) -> int:
    """Runs a coordinator until a signal; returns the exit code."""
    configure_logging(role=_ROLE, level=config.server.log_level)
    die_with_parent(config.server.parent_pid)
    if not config.api.model:
        raise ConfigError("model is '', accepted: a Hugging Face folder or a GGUF file")
    if not config.routing.decode_workers:
        raise ConfigError("decode_workers is empty, accepted: host:port of at least one")
    server = CoordinatorServer(config, load_tokenizer(config.api.model))
    await server.start()
    tasks = [
        asyncio.create_task(sample_loop_lag(server.metrics.process.loop_lag_seconds.observe)),
        asyncio.create_task(_report_ready(server, config.server.ready_file)),
    ]
    try:
        return await run_until_signal(server)
    finally:
        for task in tasks:
            task.cancel()


async def _report_ready(server: CoordinatorServer, ready_file: str) -> None:
    await server.wait_serving()
    settle_heap()
    await server.set_serving(True)
    report = server.ready_report(metrics=server.metrics_address, http=server.http_address)
    write_ready(ready_file, report)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return run_service(CoordinatorConfig, _ROLE, serve, argv)


if __name__ == "__main__":
    sys.exit(main())
