"""One rank of a worker up to the point where it can serve: met its peers, loaded its share."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from attention.interface import Group
from kvbraid.engine.communicator import make_groups
from kvbraid.engine.heartbeat import Heartbeat
from kvbraid.engine.ranks import RankContext, SpawnedRanks
from kvbraid.engine.segment import no_check
from kvbraid.engine.step_channel import StepChannel, make_step_channel
from kvbraid.errors import ConfigError, StartupError
from kvbraid.kv.kv_layout import KvLayout
from kvbraid.model.loader import load_config, model_digest
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings, TransferSettings
from kvbraid.telemetry.metrics import WorkerMetrics
from kvbraid.worker.kv_ports import KvPorts
from kvbraid.worker.rank_assembly import (
    BuiltRank,
    RankSettings,
    build_rank,
    communicator_kind,
    compute_device,
    compute_dtype,
    kv_layout,
)

# Ranks may load their weights at different speeds before they meet again; the heartbeat, not this,
# finds a rank that is dead or frozen.
_COLLECTIVE_TIMEOUT_S = 300.0


class WorkerSettings(RankSettings, Protocol):
    """Sections of a worker's config."""

    @property
    def server(self) -> ServerSettings:
        """Where it listens."""
        ...

    @property
    def transfer(self) -> TransferSettings:
        """How KV travels."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Everything of one rank that stands before it serves."""

    settings: WorkerSettings
    role: str
    context: RankContext
    communicator: str
    group: Group
    layout: KvLayout
    max_model_len: int
    vocab_size: int
    built: BuiltRank
    channel: StepChannel
    ports: KvPorts
    server: RpcServer
    metrics: WorkerMetrics
    incarnation: int
    heartbeat: Heartbeat


@asynccontextmanager
async def prepared_rank(
    settings: WorkerSettings, role: str, context: RankContext, spawned: SpawnedRanks | None
) -> AsyncIterator[Rank]:
    """Meet the other ranks and load this rank's share; close everything afterwards.

    Raises StartupError when settings, checkpoint or peers do not fit.
    """
    check = spawned.check_alive if spawned is not None else no_check
    parallel = settings.parallel
    heartbeat = await asyncio.to_thread(
        Heartbeat, context, timeout_s=parallel.heartbeat_seconds, check=check
    )
    heartbeat.start()
    async with AsyncExitStack() as stack:
        stack.push(lambda kind, error, traceback: _leave(heartbeat, error))
        kind = communicator_kind(context, parallel)
        groups = await asyncio.to_thread(
            make_groups,
            kind,
            context,
            tp_size=parallel.tp_size,
            dcp_size=parallel.dcp_size,
            timeout_s=_COLLECTIVE_TIMEOUT_S,
            check=check,
        )
        channel = await asyncio.to_thread(make_step_channel, context, check=check)
        config = load_config(settings.model.model)
        max_model_len = _max_model_len(settings.model.max_model_len, config.max_position_embeddings)
        dtype = compute_dtype(settings.model, compute_device(settings.model, context.local_rank))
        digest = await asyncio.to_thread(model_digest, settings.model.model)
        layout = kv_layout(config, parallel, settings.kv, dtype, digest)
        metrics = WorkerMetrics(role)
        incarnation = await asyncio.to_thread(_agree_on_incarnation, groups.tp)
        ports = KvPorts(
            rank=context.rank,
            incarnation=incarnation,
            transfer=settings.transfer,
            server=settings.server,
        )
        server = RpcServer(
            role=role, settings=_rank_server(settings.server, context), metrics=metrics.rpc
        )
        stack.push_async_callback(server.stop)
        ports.add_to(server)
        await stack.enter_async_context(ports.running())
        built = await asyncio.to_thread(
            build_rank,
            settings=settings,
            context=context,
            tp_group=groups.tp,
            dcp_group=groups.dcp,
            config=config,
            layout=layout,
            max_model_len=max_model_len,
            receiver=ports.receiver,
            sender=ports.sender,
            observe_exchange=metrics.engine.dcp_exchange_seconds.labels(
                exchange=parallel.exchange
            ).observe,
        )
        yield Rank(
            settings=settings,
            role=role,
            context=context,
            communicator=kind,
            group=groups.tp,
            layout=layout,
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
            built=built,
            channel=channel,
            ports=ports,
            server=server,
            metrics=metrics,
            incarnation=incarnation,
            heartbeat=heartbeat,
        )


def _leave(heartbeat: Heartbeat, error: BaseException | None) -> None:
    """A rank that broke stays without a farewell: the others find it dead instead of waiting for
    it. A StartupError is the settings' fault, which every rank reports for itself."""
    if not isinstance(error, Exception) or isinstance(error, StartupError):
        heartbeat.stop()


def _agree_on_incarnation(group: Group) -> int:
    """One random number a worker: its ranks start, serve and die together."""
    drawn = torch.tensor([secrets.randbits(63)], dtype=torch.int64)
    return int(group.broadcast(drawn, 0))


def _max_model_len(asked: int, model_limit: int) -> int:
    if asked > model_limit:
        raise ConfigError(f"max_model_len {asked}: the model's own limit is {model_limit}")
    return asked or model_limit


def _rank_server(settings: ServerSettings, context: RankContext) -> ServerSettings:
    """Rank r listens on port + r, or on whatever port the system gives."""
    return replace(settings, port=settings.port and settings.port + context.rank)
