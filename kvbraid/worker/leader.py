"""Rank 0 of a worker: the engine, the role's services, metrics, and what the others must know."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from kvbraid.engine.drafted_decoding import DraftedDecoding
from kvbraid.engine.engine import Engine
from kvbraid.engine.scheduler import Scheduler, SchedulerLimits
from kvbraid.engine.speculation import Speculation
from kvbraid.errors import ConfigError
from kvbraid.kv.page_allocator import PageAllocator
from kvbraid.kv.prefix_cache import PrefixCache
from kvbraid.rpc.lifecycle import run_until_signal
from kvbraid.rpc.ready import write_ready
from kvbraid.rpc.server import RpcServer
from kvbraid.settled_heap import settle_heap
from kvbraid.speculative.draft_policy import DraftPolicy
from kvbraid.telemetry.endpoint import MetricsEndpoint
from kvbraid.telemetry.loop_lag import sample_loop_lag
from kvbraid.tokenizer import load_tokenizer
from kvbraid.worker.cost_profile import profile_costs
from kvbraid.worker.drafter_check import check_drafter, check_prompt
from kvbraid.worker.drafting_assembly import drafting_of
from kvbraid.worker.endpoints import gather_endpoints
from kvbraid.worker.engine_thread import EngineFailedError, EngineThread
from kvbraid.worker.engine_watch import EngineWatch
from kvbraid.worker.grant_issuer import GrantIssuer
from kvbraid.worker.info_servicer import WorkerInfoServicer, add_info_service
from kvbraid.worker.rank import Rank
from kvbraid.worker.rank_compute import num_compute_threads
from kvbraid.worker.rank_watch import follow_ranks, watch_rank
from kvbraid.worker.request_streams import RequestStreams
from kvbraid.worker.window_rehearsal import rehearse_windows
from kvbraid.worker.worker import StepObserver, Worker, WorkerIdentity

logger = logging.getLogger(__name__)

AddServices = Callable[[RpcServer, Worker], None]

# The engine finishes its step after being told to stop; the other ranks get the last plan then.
_ENGINE_STOP_GRACE_S = 5.0


async def lead(rank: Rank, add_services: AddServices) -> int:
    """Serve the role and run the engine until a signal; returns the exit code.

    Raises EngineFailedError when the engine thread has ended by an error.
    """
    settings, loop = rank.settings, asyncio.get_running_loop()
    issuer = GrantIssuer(
        layout=rank.layout,
        incarnation=rank.incarnation,
        lease_ms=round(settings.transfer.lease_seconds * 1000),
    )
    async with AsyncExitStack() as stack:
        speculation, attach = await stack.enter_async_context(drafting_of(rank))
        engine, worker = _engine_and_worker(rank, issuer, loop, speculation)
        attach(engine.wake)
        metrics_endpoint = stack.enter_context(
            MetricsEndpoint(
                rank.metrics.registry, host=settings.server.host, port=settings.server.metrics_port
            )
        )
        add_services(rank.server, worker)
        add_info_service(rank.server, WorkerInfoServicer(worker, metrics_endpoint.address))
        await rank.server.start()
        own = rank.ports.endpoint(rank.server.address)
        issuer.publish(await asyncio.to_thread(gather_endpoints, own, rank.control_group))
        await follow_ranks(rank.metrics, metrics_endpoint.address, rank.control_group)
        device = rank.built.device
        num_threads = num_compute_threads(settings.parallel, rank.context.local_world_size, device)
        thread = EngineThread(engine.run, loop, device, num_threads)
        thread.finished.add_done_callback(lambda _: worker.streams.end())
        thread.start()
        background = [
            asyncio.create_task(worker.refresh_gauges()),
            asyncio.create_task(watch_rank(rank.metrics, rank.built.device)),
            asyncio.create_task(sample_loop_lag(rank.metrics.process.loop_lag_seconds.observe)),
        ]
        if isinstance(speculation, DraftedDecoding):
            await _prepare_drafting(rank, worker, speculation)
        settle_heap()
        await rank.server.set_serving(True)
        watch = EngineWatch(
            rank.server,
            step_age_s=lambda: engine.step_age_s,
            give_up=worker.streams.give_up,
            stack=thread.stack,
            timeout_s=settings.parallel.engine_step_timeout_seconds,
        )
        background.append(asyncio.create_task(watch.run()))
        report = rank.server.ready_report(metrics=metrics_endpoint.address)
        write_ready(settings.server.ready_file, report)
        logger.info("serving", extra={"address": rank.server.address})
        code = await run_until_signal(rank.server, failure=thread.failure)
        for task in background:
            task.cancel()
        await _end_engine(engine, thread)
        if thread.failure.done():
            raise EngineFailedError(thread.failure.result())
        return code


async def _end_engine(engine: Engine, thread: EngineThread) -> None:
    if thread.finished.done():
        return
    engine.stop()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ENGINE_STOP_GRACE_S):
            await asyncio.shield(thread.finished)


async def _prepare_drafting(rank: Rank, worker: Worker, speculation: DraftedDecoding) -> None:
    """Generate with drafts, and learn what steps cost, before a client's tokens pay for it."""
    prompt = check_prompt(load_tokenizer(Path(rank.settings.model.model)))
    await check_drafter(worker, speculation, prompt)
    if rank.built.device.type != "cpu":
        await rehearse_windows(worker, speculation, prompt)
    else:
        limit_s = rank.settings.speculative.draft_profile_seconds
        await profile_costs(worker, speculation, prompt, limit_s=limit_s)
    if isinstance(speculation.policy, DraftPolicy):
        speculation.policy.begin_serving()


def _engine_and_worker(
    rank: Rank, issuer: GrantIssuer, loop: asyncio.AbstractEventLoop, speculation: Speculation
) -> tuple[Engine, Worker]:
    _check_step_budget(rank)
    identity = _identity(rank)
    streams = RequestStreams(loop)
    scheduler = _scheduler(rank, identity, issuer)
    engine = Engine(
        scheduler=scheduler,
        executor=rank.built.executor,
        channel=rank.channel,
        on_event=streams.deliver,
        on_step=StepObserver(rank.metrics),
        speculation=speculation,
        is_device_apart=rank.built.device.type != "cpu",
    )
    streams.attach(engine)
    rank.ports.on_landed(engine.wake)
    worker = Worker(
        identity=identity,
        layout=rank.layout,
        engine=engine,
        scheduler=scheduler,
        streams=streams,
        metrics=rank.metrics,
    )
    return engine, worker


def _identity(rank: Rank) -> WorkerIdentity:
    settings = rank.settings
    logical_page = rank.layout.stripe(0).logical_page_size
    num_pool_tokens = (rank.built.num_pages - 1) * logical_page
    if settings.model.max_model_len > num_pool_tokens:
        raise ConfigError(
            f"max_model_len {settings.model.max_model_len}: the KV pool holds {num_pool_tokens} "
            f"tokens; raise kv_cache_tokens, kv_memory_fraction or dcp_size"
        )
    path = Path(settings.model.model)
    return WorkerIdentity(
        role=rank.role,
        incarnation=rank.incarnation,
        model_name=settings.model.served_model_name or _model_name(path),
        vocab_size=rank.vocab_size,
        eos_token_ids=load_tokenizer(path).facts.eos_token_ids,
        max_model_len=min(rank.max_model_len, num_pool_tokens),
        num_pool_tokens=num_pool_tokens,
        max_num_seqs=settings.scheduler.max_num_seqs,
        attention_backend=rank.built.backend,
        exchange=settings.parallel.exchange,
        q_mode=settings.parallel.q_mode,
        communicator=rank.communicator,
        mover=settings.transfer.kv_mover,
    )


def _model_name(path: Path) -> str:
    return path.parent.name if path.suffix == ".gguf" else path.name


def _check_step_budget(rank: Rank) -> None:
    """Where decodes may fill a whole step, prompts would never run."""
    limits = rank.settings.scheduler
    if rank.role == "decode" and limits.max_num_batched_tokens <= limits.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens {limits.max_num_batched_tokens} must be above max_num_seqs "
            f"{limits.max_num_seqs}: every running sequence takes one token of a step"
        )


def _scheduler(rank: Rank, identity: WorkerIdentity, issuer: GrantIssuer) -> Scheduler:
    settings = rank.settings.scheduler
    logical_page = rank.layout.stripe(0).logical_page_size
    return Scheduler(
        SchedulerLimits(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            prefill_chunk_tokens=settings.prefill_chunk_tokens,
            max_num_waiting=settings.max_num_waiting,
            max_model_len=identity.max_model_len,
        ),
        PrefixCache(PageAllocator(rank.built.num_pages), logical_page),
        logical_page_size=logical_page,
        model_digest=rank.layout.model_digest,
        num_pool_tokens=identity.num_pool_tokens,
        issue_grant=issuer.issue,
        keeps_prefixes=rank.settings.kv.prefix_cache,
    )
