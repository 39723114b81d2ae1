"""An engine with a toy rank instead of real ones, driven by a script, in one thread.

A script is a generator that runs one step ahead of the engine, between planning and committing,
which is where messages of other threads may come at worst.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvbraid.engine.engine import Engine
from kvbraid.engine.events import EngineEvent, GrantReady, RequestFailed, TokensReady
from kvbraid.engine.kv_exchange import TransferProgress
from kvbraid.engine.rank_executor import RankExecutor, StepOutput
from kvbraid.engine.scheduler import Scheduler, SchedulerLimits
from kvbraid.engine.sequence import EngineRequest, SequenceKey
from kvbraid.engine.speculation import Speculation
from kvbraid.engine.step_plan import StepPlan, Stop
from kvbraid.errors import KVBraidError
from kvbraid.kv.kv_layout import KvLayout
from kvbraid.kv.page_allocator import PageAllocator
from kvbraid.kv.prefix_cache import PrefixCache
from kvbraid.request import SamplingParams
from kvbraid.transport.grant import Grant, RankEndpoint, new_transfer_id
from tools.toy_rank import PAGE, ToyRank

LAYOUT = KvLayout("gqa", 1, 1, 1, 2, "float32", 1, 1, PAGE, 1, "digest")
PENDING = TransferProgress(is_complete=0, failure=0, num_rows=0, num_bytes=0)
COMPLETE = TransferProgress(is_complete=1, failure=0, num_rows=10, num_bytes=80)
Script = Iterator[None]


def make_grant(first: int, end: int) -> Grant:
    """A grant for positions [first, end) with a transfer id of its own."""
    endpoint = RankEndpoint(0, "127.0.0.1:1", "", "", 2, 65536)
    return Grant(new_transfer_id(), 1, 1, first, end, LAYOUT, (endpoint,), 1000)


def key_of(name: str) -> SequenceKey:
    """The key of the request that a script calls `name`."""
    return SequenceKey(name, 0, 0)


class ScriptedEngine:
    """An engine, the one rank that it commands, and what it told."""

    num_receivers = 0

    def __init__(
        self,
        *,
        num_pages: int = 64,
        keeps_prefixes: bool = True,
        cache_class: type[PrefixCache] = PrefixCache,
        speculation: Speculation | None = None,
        is_device_apart: bool = False,
        **limits: int,
    ) -> None:
        defaults = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 256,
            "prefill_chunk_tokens": 256,
            "max_num_waiting": 32,
            "max_model_len": min(250, (num_pages - 1) * PAGE),
        }
        self.num_pages = num_pages
        self.scheduler = Scheduler(
            SchedulerLimits(**(defaults | limits)),
            cache_class(PageAllocator(num_pages), PAGE),
            logical_page_size=PAGE,
            model_digest="digest",
            num_pool_tokens=(num_pages - 1) * PAGE,
            issue_grant=make_grant,
            keeps_prefixes=keeps_prefixes,
        )
        self.on_launched: Callable[[], None]  # the engine's
        self.engine = Engine(
            scheduler=self.scheduler,
            executor=cast(RankExecutor, self),
            channel=self,
            on_event=self._on_event,
            on_step=lambda report: None,
            speculation=speculation,
            is_device_apart=is_device_apart,
        )
        self.rank = ToyRank()
        self.plans: list[StepPlan] = []
        self.events: list[EngineEvent] = []
        self.progress: dict[bytes, TransferProgress] = {}
        self._script: Script = iter(())

    def _on_event(self, event: EngineEvent) -> None:
        self.events.append(event)

    # The channel and the executor.

    def send(self, plan: NDArray[np.int64]) -> None:
        """There is nobody to tell, so nothing may be encoded."""
        raise AssertionError("a plan was encoded for nobody")

    def move_rows(self) -> bool:
        """As RankExecutor: something moves always, so that the engine does not sleep."""
        self._advance()
        return True

    def execute(self, plan: StepPlan) -> StepOutput:
        """As RankExecutor."""
        self.plans.append(plan)
        for operation in plan.operations:
            self.rank.apply(operation)
        if plan.has_compute:
            self.on_launched()
        output = self.rank.compute(plan)
        self._advance()
        rows = [[self.progress.get(t, PENDING) for t in plan.collect]]
        return dataclasses.replace(
            output,
            progress=np.array(rows, dtype=np.int64) if plan.collect else None,
            stopped=any(isinstance(o, Stop) for o in plan.operations),
        )

    # The script.

    def run(self, script: Script) -> None:
        """Run the engine beside `script` until both have nothing more to do."""
        self._script = script
        self.engine.run()
        counts = self.scheduler.cache.counts()
        assert counts.active == 0, "pages leaked"
        assert counts.free + counts.cached == self.num_pages - 1, "pages vanished"
        assert not self.rank.slots, "slots leaked"
        assert not self.rank.arrivals, "a grant stays open"
        assert not self.rank.departures, "a send stays open"

    def _advance(self) -> None:
        try:
            next(self._script)
        except StopIteration:
            if not self.engine.has_work:
                self.engine.stop()

    def until(self, holds: Callable[[], object]) -> Script:
        """Steps until `holds()`; fails the test when that takes too many."""
        for _ in range(200):
            if holds():
                return
            yield
        raise AssertionError("it never came")

    def submit(self, name: str, prompt: Seq[int], max_tokens: int = 5, **fields: Any) -> None:
        """Queue a greedy request; `fields` are further ones of EngineRequest."""
        sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens)
        request = EngineRequest(key_of(name), tuple(prompt), len(prompt), sampling)
        self.engine.submit(dataclasses.replace(request, **fields))

    def complete_arrival(self, name: str) -> None:
        """Every row of a granted handoff lands in the pool."""
        sequence, grant = self.scheduler.find(key_of(name)), self.grant(name)
        assert sequence is not None
        self.rank.land(sequence.slot, grant.first_position, grant.end_position)
        self.progress[grant.transfer_id] = COMPLETE

    # What was told.

    def told(self, name: str) -> list[EngineEvent]:
        """Every event of a request, in order."""
        key = key_of(name)
        return [event for event in self.events if event.key == key]

    def tokens(self, name: str) -> list[int]:
        """The tokens of a request so far."""
        return [t for e in self.chunks(name) for t in e.chunk.token_ids]

    def chunks(self, name: str) -> list[TokensReady]:
        """The chunks of a request so far."""
        return [e for e in self.told(name) if isinstance(e, TokensReady)]

    def failures(self, name: str) -> list[KVBraidError]:
        """The errors of a request."""
        return [e.error for e in self.told(name) if isinstance(e, RequestFailed)]

    def grant(self, name: str) -> Grant:
        """The grant of a handoff that is_granted."""
        return next(e.grant for e in self.told(name) if isinstance(e, GrantReady))

    def is_granted(self, name: str) -> bool:
        """Whether rows of the handoff may come."""
        return any(isinstance(e, GrantReady) for e in self.told(name))
