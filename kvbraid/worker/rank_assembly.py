"""Builds one rank of a worker: groups, model, pool, attention, KV exchange, executor."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from attention.dcp import DcpAttention
from attention.exchanges.base import ExchangeLimits
from attention.interface import Group
from attention.layout import HeadLayout, StripeLayout
from kvbraid.engine.captured_forward import CapturedForward, DecodeLimits
from kvbraid.engine.communicator import RankGroups
from kvbraid.engine.cuda_graph import CudaGraphCapture
from kvbraid.engine.debug_guard import make_guard
from kvbraid.engine.kv_exchange import KvExchange, RowReceiver, RowSender
from kvbraid.engine.model_runner import ModelRunner
from kvbraid.engine.rank_executor import RankExecutor
from kvbraid.engine.rank_state import RankState
from kvbraid.engine.ranks import RankContext
from kvbraid.engine.ratio_verification import RatioTest
from kvbraid.engine.sampled_exchange import sampled
from kvbraid.engine.step_forward import EagerForward, RankModel
from kvbraid.engine.verification import ExactMatch, Verification
from kvbraid.errors import ConfigError
from kvbraid.kv.kv_layout import KvLayout, ranks_heads
from kvbraid.kv.page_pool import KvSpec, StripedPagePool
from kvbraid.model.causal_lm import CausalLM
from kvbraid.model.config import ModelConfig
from kvbraid.model.loader import load_model
from kvbraid.model.parallel import ParallelContext
from kvbraid.settings import (
    KvSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
    SpeculativeSettings,
)
from kvbraid.speculative.drafter_source import open_drafter
from kvbraid.speculative.fused_rows import FusedRows
from kvbraid.speculative.tap_fusion import load_tap_fusion
from kvbraid.worker.attention_choice import (
    attention_needs,
    capture_obstacles,
    choose_attention,
)
from kvbraid.worker.drafter_warm_up import warm_up_fusion
from kvbraid.worker.memory import free_bytes

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RankSettings(Protocol):
    """The sections that a rank is built from; every worker's config has them."""

    @property
    def model(self) -> ModelSettings: ...
    @property
    def parallel(self) -> ParallelSettings: ...
    @property
    def kv(self) -> KvSettings: ...
    @property
    def scheduler(self) -> SchedulerSettings: ...
    @property
    def speculative(self) -> SpeculativeSettings: ...


@dataclass(frozen=True, slots=True)
class BuiltRank:
    """A rank that can execute step plans."""

    executor: RankExecutor
    pool: StripedPagePool
    runner: ModelRunner
    state: RankState
    num_pages: int
    backend: str
    device: torch.device
    dtype: torch.dtype
    verification: Verification
    fused_rows: FusedRows | None = None


def compute_device(settings: ModelSettings, local_rank: int) -> torch.device:
    """The torch device of a rank: `auto` takes the local rank's GPU when there is one."""
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)


def compute_dtype(settings: ModelSettings, device: torch.device) -> torch.dtype:
    """float32 on CPU, bfloat16 on GPUs, unless the settings say otherwise."""
    if settings.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[settings.dtype]


def kv_layout(
    config: ModelConfig,
    parallel: ParallelSettings,
    kv: KvSettings,
    dtype: torch.dtype,
    model_digest: str,
) -> KvLayout:
    """How the worker lays KV out. Raises ConfigError for sizes that cannot work."""
    mla = config.mla
    try:
        return KvLayout(
            kind=config.kv_kind,
            num_layers=config.num_layers,
            num_kv_heads=1 if mla else config.num_kv_heads,
            num_q_heads=config.num_q_heads,
            row_width=mla.latent_width if mla else 2 * config.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            tp_size=parallel.tp_size,
            dcp_size=parallel.dcp_size,
            page_size=kv.page_size,
            interleave=kv.interleave,
            model_digest=model_digest,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def communicator_kind(context: RankContext, parallel: ParallelSettings) -> str:
    """`auto` is nccl on GPUs, shared memory for CPU ranks of one host, gloo otherwise."""
    if parallel.communicator != "auto":
        return parallel.communicator
    if torch.cuda.is_available():
        return "nccl"
    return "shared_memory" if context.is_one_host else "gloo"


def num_compute_threads(parallel: ParallelSettings, local_world_size: int) -> int:
    """Share the host's cores among its ranks; more threads than cores only wait for each other."""
    cores = len(os.sched_getaffinity(0))
    return parallel.threads_per_rank or max(1, cores // local_world_size)


def build_rank(
    *,
    settings: RankSettings,
    context: RankContext,
    groups: RankGroups,
    config: ModelConfig,
    layout: KvLayout,
    max_model_len: int,
    receiver: RowReceiver,
    sender: RowSender,
    model: CausalLM | None = None,
    observe_exchange: Callable[[float], object] = lambda seconds: None,
) -> BuiltRank:
    """Loads this rank's weights, unless given `model`, and makes its pool. Takes seconds to
    minutes. observe_exchange gets the seconds of a sample of the exchanges.
    """
    device = compute_device(settings.model, context.local_rank)
    dtype = compute_dtype(settings.model, device)
    parallel = settings.parallel
    heads = layout.heads(context.rank)
    stripe = layout.stripe(context.rank)
    limits = DecodeLimits(
        settings.scheduler.max_num_seqs, _max_window(settings, config), max_model_len, dtype
    )
    attention, backend, is_captured = _attention(
        config,
        parallel,
        heads,
        stripe,
        groups.dcp,
        ExchangeLimits(limits.max_num_seqs * limits.max_window, dtype, device),
        context,
        observe_exchange,
    )
    model = model or load_model(
        settings.model.model,
        parallel=ParallelContext(heads, groups.tp, parallel.q_mode),
        dtype=dtype,
        device=device,
    )
    spec = _kv_spec(config, layout, context.rank, dtype)
    pool = _pool(settings, spec, stripe, groups.control, max_model_len, device)
    max_pages = -(-max_model_len // stripe.logical_page_size)
    state = RankState(settings.scheduler.max_num_seqs, max_pages)
    fused_rows = _fused_rows(settings, context, config, pool, dtype)
    rank_model = RankModel(
        model, attention, pool, device, None if fused_rows is None else fused_rows.layers
    )
    runner = ModelRunner(
        model=model,
        forward=(
            CapturedForward(rank_model, limits, CudaGraphCapture())
            if is_captured
            else EagerForward(rank_model)
        ),
        pool=pool,
        state=state,
        tp_group=groups.tp,
        device=device,
        tap_sink=fused_rows,
    )
    exchange = KvExchange(
        rank=context.rank, layout=layout, pool=pool, receiver=receiver, sender=sender
    )
    verification = _verification(settings.speculative, model, config, groups.tp)
    executor = RankExecutor(
        runner=runner,
        state=state,
        exchange=exchange,
        control_group=groups.control,
        guard=make_guard(parallel.debug_guard, groups.control, state),
        verification=verification,
    )
    return BuiltRank(
        executor=executor,
        pool=pool,
        runner=runner,
        state=state,
        num_pages=pool.num_pages,
        backend=backend,
        device=device,
        dtype=dtype,
        verification=verification,
        fused_rows=fused_rows,
    )


def _verification(
    settings: SpeculativeSettings, model: CausalLM, config: ModelConfig, group: Group
) -> Verification:
    if settings.draft_verification == "ratio_test":
        return RatioTest(vocab_shard=model.vocab_shard, vocab_size=config.vocab_size, group=group)
    return ExactMatch()


def _pool(
    settings: RankSettings,
    spec: KvSpec,
    stripe: StripeLayout,
    control_group: Group,
    max_model_len: int,
    device: torch.device,
) -> StripedPagePool:
    num_pages = _agreed_num_pages(settings, spec, stripe, control_group, max_model_len, device)
    pool = StripedPagePool(spec, num_pages, stripe, device)
    if settings.kv.poison_kv:
        pool.fill_nan()
    return pool


def _max_window(settings: RankSettings, config: ModelConfig) -> int:
    """Most tokens of a decode window: exchanges that own memory and graphs are sized for them."""
    if not settings.speculative.checkpoint:
        return 1
    drafter = open_drafter(settings.speculative.checkpoint, config).config
    return 1 + settings.speculative.num_drafts(drafter.max_draft_tokens)


def _fused_rows(
    settings: RankSettings,
    context: RankContext,
    config: ModelConfig,
    pool: StripedPagePool,
    dtype: torch.dtype,
) -> FusedRows | None:
    """Rank 0 alone feeds the drafter: taps are equal on every rank."""
    path = settings.speculative.checkpoint
    if not path or context.rank > 0:
        return None
    fusion = load_tap_fusion(path, config, dtype=dtype, device=pool.device)
    warm_up_fusion(fusion, dtype, pool.device)
    return FusedRows(
        fusion,
        num_slots=pool.num_slots,
        logical_page_size=pool.stripe.logical_page_size,
        dtype=dtype,
    )


def _attention(
    config: ModelConfig,
    parallel: ParallelSettings,
    heads: HeadLayout,
    stripe: StripeLayout,
    group: Group,
    limits: ExchangeLimits,
    context: RankContext,
    observe_exchange: Callable[[float], object],
) -> tuple[DcpAttention, str, bool]:
    """The attention, its backend's name and whether decode is captured in graphs."""
    num_hosts = -(-parallel.dcp_size // context.local_world_size)
    needs = attention_needs(config, parallel, heads, stripe, limits, num_hosts)
    communicator = communicator_kind(context, parallel)
    choice, is_captured = choose_attention(
        needs, parallel, capture_obstacles(config, communicator, parallel.tp_size)
    )
    for warning in choice.warnings:
        logger.warning(warning)
    attention = DcpAttention(
        geometry=needs.geometry,
        stripe=stripe,
        heads=heads,
        group=group,
        backend=choice.backend,
        exchange=sampled(choice.exchange, observe_exchange),
        q_mode=parallel.q_mode,
        limits=limits,
    )
    return attention, choice.backend.name, is_captured


def _kv_spec(config: ModelConfig, layout: KvLayout, rank: int, dtype: torch.dtype) -> KvSpec:
    if config.mla is not None:
        return KvSpec("mla", config.num_layers, 1, config.mla.latent_width, 0, dtype)
    heads = len(ranks_heads(layout, rank))
    return KvSpec("gqa", config.num_layers, heads, config.head_dim, config.head_dim, dtype)


def _agreed_num_pages(
    settings: RankSettings,
    spec: KvSpec,
    stripe: StripeLayout,
    control_group: Group,
    max_model_len: int,
    device: torch.device,
) -> int:
    """Logical pages that every rank has room for, the reserved page 0 included."""
    kv = settings.kv
    if kv.kv_cache_tokens:
        return 1 + -(-kv.kv_cache_tokens // stripe.logical_page_size)
    page_bytes = spec.num_layers * max(1, spec.num_heads) * spec.row_bytes * stripe.page_size
    budget = free_bytes(device) * kv.kv_memory_fraction
    if device.type == "cpu":
        budget /= control_group.size
    fitting = int(budget // page_bytes)
    useful = settings.scheduler.max_num_seqs * -(-max_model_len // stripe.logical_page_size)
    mine = torch.tensor([min(fitting, useful + 1)], dtype=torch.int64)
    agreed = int(control_group.all_gather(mine).min())
    if agreed < 2:
        raise ConfigError(
            f"kv_memory_fraction {kv.kv_memory_fraction} of {free_bytes(device)} free bytes holds "
            f"no page of {page_bytes} bytes; raise it, or set kv_cache_tokens"
        )
    return agreed
