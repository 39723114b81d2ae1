"""From settings to a serving worker: every rank of it runs `run_worker`.

Rank 0 (the process that was started) spawns the other local ranks, serves the role's RPCs and
runs the engine (`leader`); the others serve their KV data port and follow rank 0's step plans.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import torch

from kvbraid.engine.engine import follow
from kvbraid.engine.rank_lost import RankLostError
from kvbraid.engine.ranks import RankContext, SpawnedRanks, from_environment, spawn_ranks, start_run
from kvbraid.errors import StartupError
from kvbraid.rpc.lifecycle import EXIT_FAILED
from kvbraid.settled_heap import settle_heap
from kvbraid.telemetry.logging import configure_logging
from kvbraid.worker.endpoints import gather_endpoints
from kvbraid.worker.engine_thread import EngineFailedError, EngineThread
from kvbraid.worker.leader import AddServices, lead
from kvbraid.worker.rank import Rank, WorkerSettings, prepared_rank
from kvbraid.worker.rank_compute import num_compute_threads
from kvbraid.worker.rank_watch import rank_endpoint, served_rank

logger = logging.getLogger(__name__)

# Ranks above 0 end by themselves after the last plan; this long until they are killed.
_RANK_STOP_GRACE_S = 5.0


async def run_worker(
    settings: WorkerSettings, role: str, module: str, add_services: AddServices
) -> int:
    """Run this process's rank until a signal or a failure; returns the exit code.

    module: what `python -m` runs to make another rank of this worker, with this process's
    arguments. add_services: registers the role's servicers on rank 0's server. Raises
    StartupError when the settings, the checkpoint or the other ranks do not fit.
    """
    given = from_environment()
    context = given or start_run(settings.parallel.tp_size)
    configure_logging(role=role, rank=context.rank, level=settings.server.log_level)
    # The engine thread alone computes with more. Every thread that ever does keeps a team of
    # threads, and when teams have more threads than there are cores, OpenMP lets them sleep between
    # any two products.
    torch.set_num_threads(1)
    spawned = _spawn(module, context) if given is None and context.world_size > 1 else None
    grace_s = _RANK_STOP_GRACE_S
    try:
        async with prepared_rank(settings, role, context, spawned) as rank:
            return await (_follow(rank) if context.rank > 0 else lead(rank, add_services))
    except RankLostError as error:
        raise StartupError(f"the ranks did not come together: {error}") from error
    except EngineFailedError:
        grace_s = 0.0  # there is no last plan that the other ranks could end by
        return EXIT_FAILED
    finally:
        if spawned is not None:
            spawned.stop(grace_s)


def _spawn(module: str, context: RankContext) -> SpawnedRanks:
    return spawn_ranks([sys.executable, "-m", module, *sys.argv[1:]], context)


async def _follow(rank: Rank) -> int:
    """Serve KV and execute plans until the plan that says stop, or until rank 0 is lost."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Rank 0 drains for all ranks; a signal to the whole process group must not cut it short.
        loop.add_signal_handler(number, logger.info, "signal %s is rank 0's to handle", number.name)
    server = rank.settings.server
    try:
        await rank.server.start()
        endpoint = rank_endpoint(rank.metrics, server, rank.context.rank)
    except StartupError as error:
        # Only a port of this rank is taken; the others wait for its endpoints.
        rank.heartbeat.end_worker(str(error))
    own = rank.ports.endpoint(rank.server.address)
    await asyncio.to_thread(gather_endpoints, own, rank.control_group)
    engine = EngineThread(
        lambda: follow(rank.channel, rank.built.executor),
        loop,
        rank.built.device,
        num_compute_threads(
            rank.settings.parallel, rank.context.local_world_size, rank.built.device
        ),
    )
    async with served_rank(endpoint, rank.metrics, server, rank.control_group, rank.built.device):
        settle_heap()
        engine.start()
        await engine.finished
    if engine.failure.done():
        # Rank 0 may wait for this rank in a collective: one that left in peace would not be missed.
        rank.heartbeat.end_worker(engine.failure.result())
    return 0
