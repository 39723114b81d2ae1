"""Builds what rank 0 drafts with: nothing, a drafter of its own, or a draft service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from kvbraid.engine.drafted_decoding import DraftedDecoding, GrantingDrafting
from kvbraid.engine.prompt_rows import PromptRows
from kvbraid.engine.speculation import PlainDecoding, Speculation, SpeculationReport
from kvbraid.model.config import ModelConfig
from kvbraid.rpc.channels import ChannelPool
from kvbraid.settings import SpeculativeSettings
from kvbraid.speculative.draft_policy import DraftPolicy
from kvbraid.speculative.drafter import load_drafter
from kvbraid.speculative.drafter_config import AnyDrafterConfig, DSparkConfig
from kvbraid.speculative.drafter_digest import drafter_digest
from kvbraid.speculative.drafter_source import OpenedDrafter, open_drafter
from kvbraid.speculative.embedded_drafting import EmbeddedDrafting
from kvbraid.speculative.fixed_policy import FixedPolicy
from kvbraid.speculative.fused_rows import FusedRows, RowsInPlace
from kvbraid.speculative.verify_budget import WidthRule
from kvbraid.telemetry.speculation_metrics import SpeculationMetrics
from kvbraid.transport.draft_terms import DraftPeer, DraftTerms
from kvbraid.worker.drafter_terms import drafter_terms
from kvbraid.worker.drafter_warm_up import warm_up_proposer
from kvbraid.worker.proposer_assembly import build_proposer
from kvbraid.worker.rank import Rank
from kvbraid.worker.rank_assembly import BuiltRank, RankSettings
from kvbraid.worker.receiving_drafting import ReceivingDrafting
from kvbraid.worker.remote_drafting import RemoteDrafting
from kvbraid.worker.row_pusher import RowPusher

OnReport = Callable[[SpeculationReport], None]

# Rows of one message of a prompt: well below what a channel takes.
_MESSAGE_ROWS_BYTES = 1 << 20
# The first rows of a prefill worker come with a connection yet to be made.
_ROWS_PATIENCE_S = 1.0


class RankSpeculation(NamedTuple):
    """What a worker's engine drafts with. attach: tells it how to wake the engine."""

    speculation: Speculation
    attach: Callable[[Callable[[], None]], None] = lambda wake: None


@asynccontextmanager
async def drafting_of(rank: Rank) -> AsyncIterator[RankSpeculation]:
    """What the engine of this worker drafts with, until the block ends; before its server starts.

    Raises CheckpointError and ConfigError for a drafter that does not fit.
    """
    settings = rank.settings.speculative
    if rank.built.fused_rows is None:
        yield RankSpeculation(PlainDecoding())
        return
    observer = SpeculationObserver(rank.metrics.speculation, is_remote=bool(settings.draft_worker))
    async with AsyncExitStack() as stack:
        if rank.role == "prefill":
            yield RankSpeculation(await _prompt_rows(rank, rank.built.fused_rows, stack))
        elif settings.draft_worker:
            opened = open_drafter(settings.checkpoint, rank.config)
            drafting = await _remote(rank, opened, stack)
            yield RankSpeculation(
                _drafted(
                    rank.settings, rank.built, opened.config, drafting, rank.max_model_len, observer
                )
            )
        else:
            yield await _receiving(rank, observer)


def embedded_speculation(
    settings: RankSettings,
    built: BuiltRank,
    target: ModelConfig,
    *,
    max_model_len: int,
    on_report: OnReport,
) -> DraftedDecoding:
    """With the settings' drafter on this rank. Takes as long as loading it does.

    Every sequence that runs gets its whole context, unless the settings bound it: the drafter's KV
    is one or a few layers, and rank 0 alone holds it.
    """
    config = open_drafter(settings.speculative.drafter, target).config
    drafting = _embedded(settings, built, config, max_model_len)
    return _drafted(settings, built, config, drafting, max_model_len, on_report)


def _embedded(
    settings: RankSettings, built: BuiltRank, config: AnyDrafterConfig, max_model_len: int
) -> EmbeddedDrafting:
    speculative, max_num_seqs = settings.speculative, settings.scheduler.max_num_seqs
    logical_page = built.pool.stripe.logical_page_size
    num_pool_tokens = (built.num_pages - 1 + max_num_seqs) * logical_page
    proposer = build_proposer(
        load_drafter(
            speculative.drafter, settings.model.model, dtype=built.dtype, device=built.device
        ),
        cuda_graphs=settings.parallel.cuda_graphs,
        num_kv_tokens=speculative.draft_kv_tokens or num_pool_tokens,
        max_sequences=max_num_seqs,
        max_len=max_model_len,
    )
    max_drafts = speculative.num_drafts(config.max_draft_tokens)
    warm_up_proposer(
        proposer, built.dtype, built.device, max_drafts=max_drafts, max_len=max_model_len
    )
    return EmbeddedDrafting(proposer, max_drafts)


async def _prompt_rows(rank: Rank, rows: FusedRows, stack: AsyncExitStack) -> PromptRows:
    opened = open_drafter(rank.settings.speculative.checkpoint, rank.config)
    channels = await stack.enter_async_context(ChannelPool(rank.settings.server))
    pusher = RowPusher(
        channels=channels.channel,
        drafter_digest=drafter_digest(opened),
        hidden_size=opened.config.fused_width,
        metrics=rank.metrics.speculation,
    )
    pusher.start()
    stack.push_async_callback(pusher.stop)
    logical_page = rank.built.pool.stripe.logical_page_size
    return PromptRows(pusher, rows, logical_page_size=logical_page)


async def _receiving(rank: Rank, observer: OnReport) -> RankSpeculation:
    """A drafter of this worker's own; prefill workers push the rows of prompts to it."""
    settings = rank.settings
    opened = open_drafter(settings.speculative.checkpoint, rank.config)
    embedded = await asyncio.to_thread(
        _embedded, settings, rank.built, opened.config, rank.max_model_len
    )
    # A fixed policy drafts in every step, so it waits; else plain steps cost less than waiting.
    is_fixed = settings.speculative.draft_policy == "fixed"
    drafting = ReceivingDrafting(
        embedded,
        _terms(rank, opened, embedded.max_draft_tokens),
        address=lambda: rank.server.address,
        max_grants=4 * settings.scheduler.max_num_seqs,
        lease_s=settings.transfer.lease_seconds,
        rows_wait_s=settings.speculative.draft_timeout_ms / 1000 if is_fixed else 0.0,
        rows_patience_s=0.0 if is_fixed else _ROWS_PATIENCE_S,
    )
    drafting.serve_on(rank.server)
    drafted = _drafted(settings, rank.built, opened.config, drafting, rank.max_model_len, observer)
    drafting.keep_in(drafted.keep_rows)
    return RankSpeculation(drafted, drafting.on_rows)


def _terms(rank: Rank, opened: OpenedDrafter, max_drafts: int) -> DraftTerms:
    row_bytes = opened.config.fused_width * rank.built.dtype.itemsize
    return drafter_terms(
        opened,
        epoch=rank.incarnation,
        target_digest=rank.layout.model_digest,
        dtype=rank.built.dtype,
        max_draft_tokens=max_drafts,
        max_rows_per_message=max(1, _MESSAGE_ROWS_BYTES // row_bytes),
        max_sequences=rank.settings.scheduler.max_num_seqs,
        max_position=rank.max_model_len,
    )


async def _remote(rank: Rank, opened: OpenedDrafter, stack: AsyncExitStack) -> RemoteDrafting:
    settings = rank.settings
    channels = await stack.enter_async_context(ChannelPool(settings.server))
    drafting = RemoteDrafting(
        address=settings.speculative.draft_worker,
        peer=DraftPeer(
            incarnation=rank.incarnation,
            target_digest=rank.layout.model_digest,
            drafter_digest=drafter_digest(opened),
            vocab_size=rank.vocab_size,
            max_draft_tokens=settings.speculative.num_drafts(opened.config.max_draft_tokens),
        ),
        settings=settings.speculative,
        channels=channels.channel,
        tls=settings.server.tls,
        metrics=rank.metrics.speculation,
    )
    drafting.start()
    stack.push_async_callback(drafting.stop)
    return drafting


def _drafted(
    settings: RankSettings,
    built: BuiltRank,
    config: AnyDrafterConfig,
    drafting: GrantingDrafting,
    max_model_len: int,
    on_report: OnReport,
) -> DraftedDecoding:
    rows = built.fused_rows
    assert rows is not None
    return DraftedDecoding(
        drafting,
        rows,
        _policy(settings.speculative, config, built.verification.width_rule),
        built.verification.drawing,
        logical_page_size=built.pool.stripe.logical_page_size,
        max_model_len=max_model_len,
        vocab_size=built.runner.model.config.vocab_size,
        on_report=on_report,
        task_rows=rows if settings.speculative.draft_worker else RowsInPlace(rows),
    )


def _policy(
    settings: SpeculativeSettings, config: AnyDrafterConfig, width_rule: WidthRule
) -> DraftPolicy | FixedPolicy:
    max_drafts = settings.num_drafts(config.max_draft_tokens)
    if settings.draft_policy == "fixed":
        return FixedPolicy(max_drafts)
    return DraftPolicy(
        max_drafts, width_rule=width_rule, drafts_in_blocks=isinstance(config, DSparkConfig)
    )


class SpeculationObserver:
    """Counts what a step drafted and verified; called in the engine thread."""

    def __init__(self, metrics: SpeculationMetrics, *, is_remote: bool) -> None:
        """is_remote: RemoteDrafting itself tells the wire's time from the drafter's."""
        self._metrics = metrics
        self._is_remote = is_remote

    def __call__(self, report: SpeculationReport) -> None:
        """One step."""
        self._metrics.observe_verified(report.windows)
        for reason, count in report.plain.items():
            self._metrics.count_fallback(reason, count)
        if report.windows:
            self._metrics.observe_part("tap", report.tap_s)
            if not self._is_remote:
                self._metrics.observe_part("draft", report.draft_s)
            self._metrics.observe_part("verify", report.verify_s)
