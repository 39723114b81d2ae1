"""A rank process of an engine world: one model, and for each case a pool, attention and engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from kvbraid.engine.communicator import RankGroups, make_groups
from kvbraid.engine.drafted_decoding import GrantingDrafting
from kvbraid.engine.engine import Engine, follow
from kvbraid.engine.ranks import RankContext
from kvbraid.engine.scheduler import Scheduler, SchedulerLimits
from kvbraid.engine.speculation import PlainDecoding, Speculation
from kvbraid.engine.step_channel import StepChannel, make_step_channel
from kvbraid.kv.page_allocator import PageAllocator
from kvbraid.kv.prefix_cache import PrefixCache
from kvbraid.model.causal_lm import CausalLM
from kvbraid.model.loader import load_config, load_model
from kvbraid.model.parallel import ParallelContext
from kvbraid.settings import (
    KvSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
    SpeculativeSettings,
)
from kvbraid.speculative.proposal import Answer, DraftTask
from kvbraid.worker.drafting_assembly import embedded_speculation
from kvbraid.worker.rank_assembly import BuiltRank, build_rank, kv_layout
from kvbraid.worker.rank_compute import compute_device, compute_dtype
from tools.engine_case import Case, Forced, Outcome, Prompt
from tools.engine_run import EngineRun
from tools.forcing_runner import ForcingRunner, RecordingRunner
from tools.no_transfers import NoReceiver, NoSender


@dataclass(frozen=True, slots=True)
class _Settings:
    model: ModelSettings
    parallel: ParallelSettings
    kv: KvSettings
    scheduler: SchedulerSettings
    speculative: SpeculativeSettings


@dataclass(frozen=True, slots=True)
class Topology:
    """What every rank process of a topology is told."""

    model: str
    dcp_size: int
    communicator: str
    device: str
    dtype: str


@dataclass(slots=True)
class WorldRank:
    context: RankContext
    world: Topology
    groups: RankGroups
    channel: StepChannel
    models: dict[str, CausalLM] = field(default_factory=dict)

    def build(self, case: Case) -> BuiltRank:
        """A rank whose model is kept from case to case."""
        settings = _settings(self, case)
        config = load_config(self.world.model)
        device = compute_device(settings.model, self.context.local_rank)
        dtype = compute_dtype(settings.model, device)
        layout = kv_layout(config, settings.parallel, settings.kv, dtype, "digest")
        if case.q_mode not in self.models:
            heads = layout.heads(self.context.rank)
            self.models[case.q_mode] = load_model(
                self.world.model,
                parallel=ParallelContext(heads, self.groups.tp, case.q_mode),
                dtype=dtype,
                device=device,
            )
        return build_rank(
            settings=settings,
            context=self.context,
            groups=self.groups,
            config=config,
            layout=layout,
            max_model_len=case.max_model_len,
            receiver=NoReceiver(),
            sender=NoSender(),
            model=self.models[case.q_mode],
        )


def _settings(rank: WorldRank, case: Case) -> _Settings:
    return _Settings(
        ModelSettings(
            model=rank.world.model,
            dtype=rank.world.dtype,  # type: ignore[arg-type]
            device=rank.world.device,
        ),
        ParallelSettings(
            tp_size=rank.context.world_size,
            dcp_size=rank.world.dcp_size,
            q_mode=case.q_mode,  # type: ignore[arg-type]
            exchange=case.exchange,  # type: ignore[arg-type]
            cuda_graphs=case.cuda_graphs,  # type: ignore[arg-type]
        ),
        KvSettings(
            page_size=case.page_size,
            interleave=case.interleave,
            kv_cache_tokens=case.kv_cache_tokens,
            poison_kv=True,
        ),
        SchedulerSettings(
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.batched_tokens,
            prefill_chunk_tokens=case.chunk_tokens,
        ),
        SpeculativeSettings(
            drafter=case.drafter,
            max_draft_tokens=case.max_draft_tokens,
            draft_policy=case.draft_policy,  # type: ignore[arg-type]
            draft_verification=case.draft_verification,  # type: ignore[arg-type]
        ),
    )


def run_rank(context: RankContext, world: Topology, pipe: Connection | None) -> None:
    """What a rank's process does. Rank 0 answers a case and its phases on `pipe` with an Outcome,
    until it is told None; the others, without a pipe, follow it."""
    torch.set_num_threads(1)
    if world.device == "cuda":
        torch.cuda.set_device(context.local_rank)
    groups = make_groups(
        world.communicator, context, tp_size=context.world_size, dcp_size=world.dcp_size
    )
    rank = WorldRank(context, world, groups, make_step_channel(context))
    if pipe is None:
        while (told := _from_words(rank.channel.receive(lambda: None))) is not None:
            case, forced = told
            built = rank.build(case)
            follow(rank.channel, _executor(rank, built, case, forced))
        return
    while (message := pipe.recv()) is not None:
        # An error ends this process, and the one that asked reads the end of the pipe.
        pipe.send(_lead(rank, *message))
    rank.channel.send(_to_words(None))


def _executor(rank: WorldRank, built: BuiltRank, case: Case, forced: Forced) -> Any:
    if case.record_logits:
        built.executor.runner = RecordingRunner(built.runner, rank.groups.tp, forced)
    elif forced:
        built.executor.runner = ForcingRunner(built.runner, forced)
    return built.executor


def _to_words(told: tuple[Case, Forced] | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    value = None if told is None else [asdict(told[0]), list(told[1].items())]
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8).astype(np.int64)


def _from_words(words: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[Case, Forced] | None:
    value = json.loads(words.astype(np.uint8).tobytes())
    if value is None:
        return None
    case, forced = value
    return Case(**case), {tuple(prompt): tuple(tokens) for prompt, tokens in forced}


def _lead(rank: WorldRank, case: Case, phases: list[list[Prompt]]) -> Outcome:
    forced = {p.token_ids: p.forced for phase in phases for p in phase if p.forced}
    rank.channel.send(_to_words((case, forced)))
    built = rank.build(case)
    run = EngineRun(phases)
    executor = _executor(rank, built, case, forced)
    page = case.page_size * rank.world.dcp_size
    run.engine = Engine(
        scheduler=_scheduler(case, built, page),
        executor=executor,
        channel=rank.channel,
        on_event=run.on_event,
        on_step=run.on_step,
        speculation=_speculation(rank, case, built, run),
    )
    run.submit_phase()
    run.engine.run()
    if run.failure is not None:
        raise run.failure
    if case.record_logits:
        recorder = executor.runner
        assert isinstance(recorder, RecordingRunner)
        run.outcome.logits = [torch.stack(recorder.rows[prompt.token_ids]) for prompt in phases[-1]]
    return run.outcome


def _scheduler(case: Case, built: BuiltRank, page: int) -> Scheduler:
    tokens = (built.num_pages - 1) * page
    return Scheduler(
        SchedulerLimits(
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.batched_tokens,
            prefill_chunk_tokens=case.chunk_tokens,
            max_num_waiting=1024,
            max_model_len=min(case.max_model_len, tokens),
        ),
        PrefixCache(PageAllocator(built.num_pages), page),
        logical_page_size=page,
        model_digest="digest",
        num_pool_tokens=tokens,
        issue_grant=_no_grants,
    )


def _speculation(rank: WorldRank, case: Case, built: BuiltRank, run: EngineRun) -> Speculation:
    if built.fused_rows is None:
        return PlainDecoding()
    limits = _scheduler(case, built, case.page_size * rank.world.dcp_size).limits
    speculation = embedded_speculation(
        _settings(rank, case),
        built,
        load_config(rank.world.model),
        max_model_len=limits.max_model_len,
        on_report=lambda report: run.outcome.windows.append(report.windows),
    )
    if case.drafter_forgets_at:
        speculation._drafting = ForgetfulDrafter(speculation._drafting, case.drafter_forgets_at)
    return speculation


class ForgetfulDrafter:
    """A drafter that loses its sequences once, as one that was restarted."""

    def __init__(self, drafting: GrantingDrafting, step: int) -> None:
        self._drafting = drafting
        self._left = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafting, name)

    def step(self, tasks: Sequence[DraftTask]) -> list[Answer | None]:
        """See Drafting."""
        self._left -= 1
        if self._left == 0:
            for task in tasks:
                self._drafting.drop(task.key)
        return self._drafting.step(tasks)


def _no_grants(first: int, end: int) -> Any:
    raise AssertionError("no handoffs at the engine seam")
