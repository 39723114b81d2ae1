"""One rank of a worker up to the point where it can serve: met its peers, loaded its share."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from attention.interface import Group
from kvbraid.engine.communicator import RankGroups, make_groups
from kvbraid.engine.heartbeat import Heartbeat
from kvbraid.engine.host_heartbeat import HostHeartbeat, connect_hosts
from kvbraid.engine.ranks import RankContext, SpawnedRanks
from kvbraid.engine.segment import no_check
from kvbraid.engine.step_channel import StepChannel, make_step_channel
from kvbraid.errors import ConfigError, StartupError
from kvbraid.kv.kv_layout import KvLayout
from kvbraid.model.config import ModelConfig
from kvbraid.model.loader import load_config, model_digest
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ParallelSettings, ServerSettings, TransferSettings
from kvbraid.telemetry.metrics import WorkerMetrics
from kvbraid.worker.kv_ports import KvPorts
from kvbraid.worker.rank_assembly import (
    BuiltRank,
    RankSettings,
    build_rank,
    kv_layout,
)
from kvbraid.worker.rank_compute import communicator_kind, compute_device, compute_dtype

# Ranks may load their weights at different speeds before they meet again; the heartbeats, not this,
# find a rank or a host that is dead or frozen.
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
    control_group: Group
    config: ModelConfig
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
    heartbeat = await asyncio.to_thread(
        Heartbeat, context, timeout_s=settings.parallel.heartbeat_seconds, check=check
    )
    heartbeat.start()
    async with AsyncExitStack() as stack:
        stack.push(lambda kind, error, traceback: _leave(heartbeat, error))
        groups, channel, hosts = await asyncio.to_thread(
            _meet, settings.parallel, context, heartbeat, check
        )
        stack.push(lambda kind, error, traceback: _leave(hosts, error))
        shape = await asyncio.to_thread(_shape, settings, context)
        metrics = WorkerMetrics(role, rank=context.rank)
        incarnation = await asyncio.to_thread(_agree_on_incarnation, groups.control)
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
        built = await asyncio.to_thread(_build, settings, context, groups, shape, ports, metrics)
        yield Rank(
            settings=settings,
            role=role,
            context=context,
            communicator=communicator_kind(context, settings.parallel),
            control_group=groups.control,
            config=shape.config,
            layout=shape.layout,
            max_model_len=shape.max_model_len,
            vocab_size=shape.config.vocab_size,
            built=built,
            channel=channel,
            ports=ports,
            server=server,
            metrics=metrics,
            incarnation=incarnation,
            heartbeat=heartbeat,
        )


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the checkpoint and the settings make of the worker."""

    config: ModelConfig
    layout: KvLayout
    max_model_len: int


def _meet(
    parallel: ParallelSettings,
    context: RankContext,
    heartbeat: Heartbeat,
    check: Callable[[], None],
) -> tuple[RankGroups, StepChannel, HostHeartbeat]:
    groups = make_groups(
        communicator_kind(context, parallel),
        context,
        tp_size=parallel.tp_size,
        dcp_size=parallel.dcp_size,
        timeout_s=_COLLECTIVE_TIMEOUT_S,
        check=check,
    )
    hosts = connect_hosts(
        context, groups.control, heartbeat.end_worker, timeout_s=parallel.heartbeat_seconds
    )
    hosts.start()
    return groups, make_step_channel(context, check=check), hosts


def _shape(settings: WorkerSettings, context: RankContext) -> _Shape:
    path = settings.model.model
    config = load_config(path)
    dtype = compute_dtype(settings.model, compute_device(settings.model, context.local_rank))
    layout = kv_layout(config, settings.parallel, settings.kv, dtype, model_digest(path))
    return _Shape(
        config,
        layout,
        _max_model_len(settings.model.max_model_len, config.max_position_embeddings),
    )


def _build(
    settings: WorkerSettings,
    context: RankContext,
    groups: RankGroups,
    shape: _Shape,
    ports: KvPorts,
    metrics: WorkerMetrics,
) -> BuiltRank:
    return build_rank(
        settings=settings,
        context=context,
        groups=groups,
        config=shape.config,
        layout=shape.layout,
        max_model_len=shape.max_model_len,
        receiver=ports.receiver,
        sender=ports.sender,
        observe_exchange=metrics.rank.exchange_seconds(settings.parallel.exchange).observe,
    )


def _leave(heartbeat: Heartbeat | HostHeartbeat, error: BaseException | None) -> None:
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
    """Rank r listens on port + r, or on whatever port the system gives; rank 0 answers for all
    ranks to probes."""
    return replace(
        settings,
        port=settings.port and settings.port + context.rank,
        health_port=settings.health_port if context.rank == 0 else None,
    )
