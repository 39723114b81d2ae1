"""Builds one rank of a worker: groups, model, pool, attention, KV exchange, executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from attention.interface import Group
from attention.layout import StripeLayout
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
from kvbraid.engine.step_forward import EagerForward, RankModel, StepForward
from kvbraid.engine.verification import ExactMatch, Verification
from kvbraid.errors import ConfigError
from kvbraid.kv.kv_layout import KvLayout
from kvbraid.kv.page_pool import KvSpec, StripedPagePool
from kvbraid.model.causal_lm import CausalLM
from kvbraid.model.config import ModelConfig
from kvbraid.model.layer_taps import Fusion
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
from kvbraid.speculative.late_fusion import LateFusion, TapsAsRows
from kvbraid.speculative.padded_fusion import PaddedFusion
from kvbraid.speculative.tap_fusion import load_tap_fusion
from kvbraid.worker.attention_assembly import build_attention
from kvbraid.worker.drafter_warm_up import warm_up_fusion
from kvbraid.worker.pool_assembly import build_pool, kv_spec
from kvbraid.worker.rank_compute import compute_device, compute_dtype


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
    limits = DecodeLimits(
        settings.scheduler.max_num_seqs, _max_window(settings, config), max_model_len, dtype
    )
    built = build_attention(
        config=config,
        parallel=settings.parallel,
        context=context,
        layout=layout,
        group=groups.dcp,
        limits=limits,
        device=device,
        observe_exchange=observe_exchange,
    )
    heads, stripe = layout.heads(context.rank), layout.stripe(context.rank)
    parallel = ParallelContext(heads, groups.tp, settings.parallel.q_mode)
    model = model or load_model(settings.model.model, parallel=parallel, dtype=dtype, device=device)
    state = RankState(limits.max_num_seqs, -(-max_model_len // stripe.logical_page_size))
    spec = kv_spec(config, layout, context.rank, dtype)
    pool = _pool(settings.kv, spec, stripe, state, groups.control, device)
    rows = _drafter_rows(settings, context, config, pool, dtype)
    rank_model = RankModel(model, built.attention, pool, device, rows.fusion)
    forward = _forward(rank_model, limits, built.is_captured)
    runner = _runner(rank_model, forward, state, groups.tp, rows.kept)
    verification = _verification(settings.speculative, model, config, groups.tp)
    return BuiltRank(
        executor=RankExecutor(
            runner=runner,
            state=state,
            exchange=KvExchange(
                rank=context.rank, layout=layout, pool=pool, receiver=receiver, sender=sender
            ),
            control_group=groups.control,
            guard=make_guard(settings.parallel.debug_guard, groups.control, state),
            verification=verification,
        ),
        pool=pool,
        runner=runner,
        state=state,
        num_pages=pool.num_pages,
        backend=built.backend,
        device=device,
        dtype=dtype,
        verification=verification,
        fused_rows=rows.kept,
    )


def _pool(
    settings: KvSettings,
    spec: KvSpec,
    stripe: StripeLayout,
    state: RankState,
    control_group: Group,
    device: torch.device,
) -> StripedPagePool:
    return build_pool(
        settings,
        spec,
        stripe,
        useful_tokens=state.page_table.size * stripe.logical_page_size,
        control_group=control_group,
        device=device,
    )


def _forward(rank: RankModel, limits: DecodeLimits, is_captured: bool) -> StepForward:
    if is_captured:
        return CapturedForward(rank, limits, CudaGraphCapture())
    return EagerForward(rank)


def _runner(
    rank: RankModel, forward: StepForward, state: RankState, group: Group, rows: FusedRows | None
) -> ModelRunner:
    return ModelRunner(
        model=rank.model,
        forward=forward,
        pool=rank.pool,
        state=state,
        tp_group=group,
        device=rank.device,
        row_sink=rows,
    )


def _verification(
    settings: SpeculativeSettings, model: CausalLM, config: ModelConfig, group: Group
) -> Verification:
    if settings.draft_verification == "ratio_test":
        return RatioTest(vocab_shard=model.vocab_shard, vocab_size=config.vocab_size, group=group)
    return ExactMatch()


def _max_window(settings: RankSettings, config: ModelConfig) -> int:
    """Most tokens of a decode window: exchanges that own memory and graphs are sized for them."""
    if not settings.speculative.checkpoint:
        return 1
    drafter = open_drafter(settings.speculative.checkpoint, config).config
    return 1 + settings.speculative.num_drafts(drafter.max_draft_tokens)


class _DrafterRows(NamedTuple):
    """fusion: what the forward pass does with its taps. Both None on ranks that feed no drafter."""

    fusion: Fusion | None
    kept: FusedRows | None


def _drafter_rows(
    settings: RankSettings,
    context: RankContext,
    config: ModelConfig,
    pool: StripedPagePool,
    dtype: torch.dtype,
) -> _DrafterRows:
    """Rank 0 alone feeds the drafter: taps are equal on every rank.

    GPUs fuse in the forward pass, and in its graphs: launches of its own would take longer. CPUs
    fuse many steps' taps together.
    """
    path = settings.speculative.checkpoint
    if not path or context.rank > 0:
        return _DrafterRows(None, None)
    fusion = load_tap_fusion(path, config, dtype=dtype, device=pool.device)
    if pool.device.type == "cpu":
        taps = TapsAsRows(fusion.tap_layers, config.hidden_size)
        return _DrafterRows(taps, _fused_rows(fusion, pool, dtype, LateFusion(taps, fusion)))
    warm_up_fusion(fusion, dtype, pool.device)
    return _DrafterRows(PaddedFusion(fusion), _fused_rows(fusion, pool, dtype))


def _fused_rows(
    fusion: Fusion, pool: StripedPagePool, dtype: torch.dtype, late: LateFusion | None = None
) -> FusedRows:
    return FusedRows(
        fusion.fused_width,
        num_slots=pool.num_slots,
        logical_page_size=pool.stripe.logical_page_size,
        dtype=dtype,
        late=late,
    )
