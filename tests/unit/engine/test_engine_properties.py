"""Any mix of requests, handoffs, aborts and failures: no page leaks, no request is stuck, every
request ends once, and its tokens are its own, in order.

A seed draws what happens; the engine runs with a tight pool, so that sequences are preempted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbraid.engine.events import (
    EngineEvent,
    GrantReady,
    PromptSent,
    RequestFailed,
    RowsReceived,
    TokensReady,
)
from kvbraid.engine.kv_exchange import TransferProgress, failure_code
from kvbraid.engine.sequence import Source, Status
from kvbraid.errors import DataLossError, InvalidRequestError, LeaseLostError, OverloadedError
from kvbraid.request import FinishReason
from kvbraid.transport.grant import Grant
from tools.scripted_engine import (
    COMPLETE,
    Script,
    ScriptedEngine,
    key_of,
    make_grant,
)
from tools.toy_rank import expected, toy_token

FAILURES = (DataLossError("damaged"), LeaseLostError("late"))


@dataclass
class Asked:
    """A request and what was done to it."""

    prompt: list[int]
    max_tokens: int
    source: Source = Source.COMPUTE
    destination: Grant | None = None
    is_aborted: bool = False
    has_token: bool = False


@dataclass
class Chaos:
    """Draws what happens next."""

    rng: random.Random
    world: ScriptedEngine
    asked: dict[str, Asked] = field(default_factory=dict)
    num_confirmed: int = 0
    num_aborts: int = 0

    def script(self, num_actions: int, *, stops: bool) -> Script:
        actions: list[Callable[[], None]] = [
            self.submit, self.submit, self.submit, self.abort, self.land, self.land,
            self.start, self.start, self.start_again, self.fail_transfer, self.acknowledge,
            self.poison,
        ]  # fmt: skip
        for _ in range(num_actions):
            self.rng.choice(actions)()
            for _ in range(self.rng.randrange(4)):
                yield
        if stops:
            self.world.engine.stop()
            return
        for _ in range(4000):
            if not self.world.engine.has_work:
                return
            self.settle()
            yield
        raise AssertionError(f"stuck: {[s.request.key for s in self.world.scheduler.live]}")

    def submit(self) -> None:
        name = f"r{len(self.asked)}"
        # Few first blocks, so that prompts find one another's pages.
        prompt = [self.rng.randrange(2)] * self.rng.choice((0, 64, 64, 70))
        prompt += [self.rng.randrange(50) for _ in range(self.rng.randrange(1, 20))]
        asked = Asked(prompt, self.rng.randrange(1, 20))
        kind = self.rng.randrange(4)
        if kind == 0:
            asked.source = Source.HANDOFF
            asked.max_tokens += 1  # the first one is another worker's
        elif kind == 1:
            asked.destination = make_grant(0, len(prompt))
        self.asked[name] = asked
        self.world.submit(
            name,
            prompt,
            asked.max_tokens,
            source=asked.source,
            destination=asked.destination,
        )

    def abort(self) -> None:
        name = self.some(lambda name: not self.asked[name].is_aborted)
        self.num_aborts += 1
        if name is not None:
            self.asked[name].is_aborted = True
        self.world.engine.abort(key_of(name or "nobody"), self.confirm)

    def confirm(self, was_found: bool) -> None:
        self.num_confirmed += 1

    def land(self) -> None:
        name = self.some(self.is_receiving)
        if name is not None:
            self.world.complete_arrival(name)

    def start(self) -> None:
        """The first token comes, now and then under the wrong transfer."""
        name = self.some(self.wants_token)
        if name is None:
            return
        asked = self.asked[name]
        asked.has_token = True
        transfer_id = self.world.grant(name).transfer_id
        if self.rng.random() < 0.1:
            transfer_id = b"x" * 16
        self.world.engine.start_received(key_of(name), transfer_id, toy_token(asked.prompt))

    def start_again(self) -> None:
        """Told twice, and another token the second time: the first one counts."""
        name = self.some(lambda name: self.asked[name].has_token)
        if name is not None:
            other = toy_token(self.asked[name].prompt) + 1
            self.world.engine.start_received(key_of(name), b"y" * 16, other)

    def fail_transfer(self) -> None:
        open_ones = [s for s in self.world.scheduler.live if s.grant is not None]
        if open_ones:
            grant = self.rng.choice(open_ones).grant
            assert grant is not None
            code = failure_code(self.rng.choice(FAILURES))
            self.world.progress[grant.transfer_id] = TransferProgress(0, code, 3, 24)

    def acknowledge(self) -> None:
        for sequence in self.world.scheduler.active:
            if sequence.status is Status.SENDING and self.rng.random() < 0.5:
                assert sequence.grant is not None
                self.world.progress[sequence.grant.transfer_id] = COMPLETE

    def poison(self) -> None:
        """Now and then a page goes bad: whoever reads it fails, the next one computes it anew."""
        if self.rng.random() < 0.2:
            self.world.rank.poisoned_pages.add(self.rng.randrange(1, self.world.num_pages))

    def settle(self) -> None:
        """Whatever a live request waits for comes."""
        for sequence in list(self.world.scheduler.active):
            name = sequence.request.key.request_id
            asked = self.asked[name]
            if sequence.status is Status.SENDING:
                assert sequence.grant is not None
                self.world.progress.setdefault(sequence.grant.transfer_id, COMPLETE)
            elif sequence.status is Status.RECEIVING and self.world.is_granted(name):
                transfer_id = self.world.grant(name).transfer_id
                if transfer_id not in self.world.progress:
                    self.world.complete_arrival(name)
                if self.wants_token(name):
                    asked.has_token = True
                    first = toy_token(asked.prompt)
                    self.world.engine.start_received(key_of(name), transfer_id, first)

    def wants_token(self, name: str) -> bool:
        asked = self.asked[name]
        return self.is_receiving(name) and not asked.is_aborted and not asked.has_token

    def is_receiving(self, name: str) -> bool:
        sequence = self.world.scheduler.find(key_of(name))
        return (
            sequence is not None
            and sequence.status is Status.RECEIVING
            and sequence.grant is not None
            and sequence.is_granted
        )

    def some(self, fits: Callable[[str], bool]) -> str | None:
        live = [sequence.request.key.request_id for sequence in self.world.scheduler.live]
        names = [name for name in live if fits(name)]
        return self.rng.choice(names) if names else None


def is_last(event: EngineEvent) -> bool:
    return isinstance(event, RequestFailed | PromptSent) or (
        isinstance(event, TokensReady) and event.chunk.finish_reason is not None
    )


def check_story(world: ScriptedEngine, name: str, asked: Asked, *, stopped: bool) -> None:
    """Everything that was told of one request, from the first event to the last."""
    told = world.told(name)
    ends = [index for index, event in enumerate(told) if is_last(event)]
    assert len(ends) == 1 or (stopped and not ends), f"{name} ends {len(ends)} times"
    assert not ends or ends[0] == len(told) - 1, f"{name} goes on after its end"
    first = [toy_token(asked.prompt)] if asked.source is Source.HANDOFF else []
    tokens = [*first, *world.tokens(name)]
    assert tokens == expected(asked.prompt, len(tokens)), f"{name} has tokens that are not its own"
    if asked.source is Source.HANDOFF:
        kinds = [type(event) for event in told]
        assert kinds.count(GrantReady) <= 1
        assert kinds.count(RowsReceived) <= 1
        assert TokensReady not in kinds[:1] or asked.is_aborted
    last = told[-1] if ends else None
    if isinstance(last, TokensReady) and last.chunk.finish_reason is FinishReason.LENGTH:
        limit = world.scheduler.limits.max_model_len - len(asked.prompt)
        assert len(tokens) == min(asked.max_tokens, limit)
    if isinstance(last, PromptSent):
        assert len(tokens) == 1
        assert asked.destination is not None
    if isinstance(last, RequestFailed):
        assert not isinstance(last.error, InvalidRequestError), last.error


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_pages=st.integers(30, 80),
    max_num_seqs=st.integers(1, 6),
    chunk=st.sampled_from((3, 16, 64)),
    num_actions=st.integers(5, 60),
    stops=st.booleans(),
)
def test_whatever_happens_nothing_leaks_and_every_request_ends_once(
    seed: int, num_pages: int, max_num_seqs: int, chunk: int, num_actions: int, stops: bool
) -> None:
    world = ScriptedEngine(
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        prefill_chunk_tokens=chunk,
        max_num_batched_tokens=max(chunk, max_num_seqs) + 8,
        max_num_waiting=6,
    )
    chaos = Chaos(random.Random(seed), world)
    world.run(chaos.script(num_actions, stops=stops))
    assert not world.scheduler.live
    assert world.scheduler.open_transfers() == {"in": 0, "out": 0}
    assert stops or chaos.num_confirmed == chaos.num_aborts
    for name, asked in chaos.asked.items():
        check_story(world, name, asked, stopped=stops)


def test_the_drawn_mixes_reach_what_they_are_for() -> None:
    """Preemption, every kind of end and prefix hits happen among a hundred fixed seeds."""
    seen: set[str] = set()
    for seed in range(100):
        world = ScriptedEngine(num_pages=36, max_num_waiting=6, max_num_batched_tokens=24)
        chaos = Chaos(random.Random(seed), world)
        world.run(chaos.script(40, stops=False))
        seen |= {"preempted"} if world.scheduler.num_preemptions else set()
        seen |= {"hit"} if world.scheduler.pages.num_prefix_hit else set()
        for event in world.events:
            if isinstance(event, RequestFailed):
                seen.add(type(event.error).__name__)
            elif isinstance(event, TokensReady) and event.chunk.finish_reason is not None:
                seen.add(event.chunk.finish_reason.name)
            else:
                seen.add(type(event).__name__)
    assert seen >= {
        "preempted", "hit", "KVBraidError", "LeaseLostError", "DataLossError",
        OverloadedError.__name__, "LENGTH", "ABORT", "PromptSent", "GrantReady", "RowsReceived",
    }  # fmt: skip
