"""From `python -m <service>` to its exit code.

def main(argv: Sequence[str] | None = None) -> int:
    return run_service(DecodeConfig, "decode", serve, argv)

async def serve(config: DecodeConfig) -> int:
    ...
    return await run_until_signal(server, failure=worker.failure)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import uvloop

from kvbraid.errors import StartupError
from kvbraid.rpc.certificates import check_tls, unfit_for_calls
from kvbraid.rpc.parent import die_with_parent
from kvbraid.rpc.ready import check_ready_file
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings, load_settings
from kvbraid.telemetry.logging import configure_logging

logger = logging.getLogger(__name__)


class ServiceConfig(Protocol):
    """A service's config, as far as starting it is concerned."""

    @property
    def server(self) -> ServerSettings:
        """Its server section."""
        ...


Config = TypeVar("Config", bound=ServiceConfig)

EXIT_STARTUP_REFUSED = 2
EXIT_FAILED = 70
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_service(
    config_class: type[Config],
    role: str,
    serve: Callable[[Config], Coroutine[Any, Any, int]],
    argv: Sequence[str] | None = None,
) -> int:
    """Load the settings, start logging, run `serve` in a fresh event loop, return the exit code.

    A StartupError (bad setting, refused checkpoint or certificate, taken port) is one line on
    stderr and code 2.
    """
    try:
        config = load_settings(config_class, argv, role=role)
        configure_logging(role=role, level=config.server.log_level)
        die_with_parent(config.server.parent_pid)
        check_ready_file(config.server.ready_file)
        check_tls(config.server.tls)
        if fault := unfit_for_calls(config.server.tls):
            logger.warning("called processes that ask for a certificate refuse this one: %s", fault)
        # A service's loop handles a message a token and stream: uvloop does it with less Python.
        return uvloop.run(serve(config))
    except StartupError as error:
        sys.stderr.write(f"kvbraid {role}: {error}\n")
        return EXIT_STARTUP_REFUSED


async def run_until_signal(
    server: RpcServer,
    *,
    failure: Awaitable[str] | None = None,
    drained: Callable[[], Awaitable[object]] | None = None,
) -> int:
    """Serve until told to stop, and return the exit code.

    The first SIGTERM or SIGINT drains: health NOT_SERVING, running requests finish, then `drained`
    (leases, exports), which brings its own time limit. A second signal stops at once. When
    `failure` resolves (its value is the reason) the process stops with code 70.
    """
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, signals.put_nowait, number)
    failed = asyncio.ensure_future(failure) if failure is not None else loop.create_future()
    try:
        await _first_of(signals.get(), failed)
        if failed.done():
            logger.error("stopping: %s", failed.result())
            return EXIT_FAILED
        logger.info("draining", extra={"num_running": server.num_running})
        await _first_of(_drain(server, drained), signals.get(), failed)
        return EXIT_FAILED if failed.done() else 0
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        await server.stop()


async def _drain(server: RpcServer, drained: Callable[[], Awaitable[object]] | None) -> None:
    if not await server.drain():
        logger.warning("drain time is up", extra={"num_running": server.num_running})
    if drained is not None:
        await drained()


async def _first_of(*waits: Awaitable[object]) -> None:
    """Return when one is done, and raise what it raised; futures of the caller are left alone."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    own = [task for task, wait in zip(tasks, waits, strict=True) if task is not wait]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in own:
        if task in done:
            task.result()
            continue
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
