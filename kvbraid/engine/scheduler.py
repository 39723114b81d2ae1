"""Decides each step: who decodes, which prompt chunks run, who is admitted, preempted or released.

Torch-free and free of any wire; rank 0 only. One step is `schedule` -> (every rank executes the
plan) -> `commit`. Pages are logical: a page id means the same page on every rank.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvbraid.engine.sequence import EngineRequest, Sequence, SequenceKey, Status
from kvbraid.engine.sequence_pages import SequencePages
from kvbraid.engine.sequence_transfers import SequenceTransfers, check_destination, count_open
from kvbraid.engine.step_plan import (
    AddPages,
    Admit,
    AppendToken,
    Decode,
    Extend,
    Operation,
    Release,
    StepPlan,
)
from kvbraid.errors import InvalidRequestError, OverloadedError
from kvbraid.kv.prefix_cache import PrefixCache
from kvbraid.sampling_key import sampling_key
from kvbraid.transport.grants import Grant


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one worker.

    max_num_seqs: sequences that hold pages at once. max_num_batched_tokens: tokens of one step.
    prefill_chunk_tokens: tokens of one prompt in one step. max_num_waiting: queue length at which
    new requests are refused. max_model_len: prompt plus output of one request.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_tokens: int
    max_num_waiting: int
    max_model_len: int


class Scheduler:
    """Continuous batching over a paged, striped pool with preemption by recompute."""

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: PrefixCache,
        *,
        logical_page_size: int,
        model_digest: str,
        num_pool_tokens: int,
        issue_grant: Callable[[int, int], Grant],
        keeps_prefixes: bool = True,
    ) -> None:
        """issue_grant(first_position, end_position) makes the grant of an admitted handoff.
        keeps_prefixes: leave the KV of finished prompts in `cache` for later requests.
        """
        self.limits = limits
        self.cache = cache
        self.pages = SequencePages(
            cache,
            logical_page_size=logical_page_size,
            model_digest=model_digest,
            keeps_prefixes=keeps_prefixes,
        )
        self.num_preemptions = 0
        self.wasted_tokens = {"preempted": 0, "aborted": 0, "failed": 0}
        """Tokens computed for nothing since the start, by reason."""
        self.queue_waits_s: list[float] = []
        """Seconds that sequences waited which were placed for the first time; the reader empties
        it."""
        self._transfers = SequenceTransfers(issue_grant, self.operate)
        self._num_pool_tokens = num_pool_tokens
        self._waiting: deque[Sequence] = deque()
        self._active: list[Sequence] = []
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._operations: list[Operation] = []
        self._by_key: dict[SequenceKey, Sequence] = {}

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for pages or a slot."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens that are to be computed here: of waiting sequences, unless their rows come
        from elsewhere, and the rest of running ones; the newest token of a decoding one is none.

        Other threads may ask: a deque that changes while it is iterated raises, a copy does not.
        """
        active, waiting = tuple(self._active), tuple(self._waiting)
        begun = [s for s in active if s.status is Status.RUNNING and not s.can_decode]
        return sum(len(s.token_ids) for s in waiting if not s.awaits_rows) + sum(
            s.num_uncomputed_tokens for s in begun
        )

    @property
    def active(self) -> list[Sequence]:
        """Sequences that hold pages, oldest first."""
        return self._active

    @property
    def live(self) -> list[Sequence]:
        """Every sequence, waiting ones too."""
        return [*self._active, *self._waiting]

    @property
    def num_leased_pages(self) -> int:
        """Pages of sequences whose rows come from or go to another worker; a page that several
        share counts for each. Other threads may ask."""
        return sum(len(s.pages) for s in tuple(self._active) if s.grant is not None)

    def find(self, key: SequenceKey) -> Sequence | None:
        """The live sequence of `key`."""
        return self._by_key.get(key)

    def open_transfers(self) -> dict[str, int]:
        """Handoffs under way by direction, "in" and "out"."""
        return count_open(self.live)

    def in_slot(self, slot: int) -> Sequence:
        """The sequence that holds `slot`."""
        return next(s for s in self._active if s.slot == slot)

    def submit(self, request: EngineRequest) -> Sequence:
        """Queue a request.

        Raises InvalidRequestError when it can never fit or its key or transfer is in use,
        OverloadedError when the queue is full.
        """
        length, limit = len(request.token_ids), self.limits.max_model_len
        if not 1 <= length < limit or length >= self._num_pool_tokens:
            raise InvalidRequestError(
                f"prompt of {length} tokens: this worker takes 1 to "
                f"{min(limit, self._num_pool_tokens) - 1}",
                field="token_ids",
            )
        if request.key in self._by_key:
            raise InvalidRequestError(f"request {request.key} is running already", field="ref")
        check_destination(request, self._by_key.values())
        if len(self._waiting) >= self.limits.max_num_waiting:
            raise OverloadedError(
                f"{len(self._waiting)} requests wait already (max_num_waiting "
                f"{self.limits.max_num_waiting})"
            )
        sequence = Sequence(request, list(request.token_ids), self.pages.hashes_of(request))
        self._by_key[request.key] = sequence
        self._waiting.append(sequence)
        self._transfers.begin(sequence)
        return sequence

    def operate(self, operation: Operation) -> None:
        """Put a state operation into the next plan."""
        self._operations.append(operation)

    def schedule(self) -> StepPlan:
        """The next step's batch; state operations collected since the last one come with it."""
        preempted_before = self.num_preemptions
        decodes = self._schedule_decodes()
        budget = self.limits.max_num_batched_tokens - _num_tokens(decodes)
        extends = self._schedule_extends(budget)
        budget -= sum(e.length for e in extends)
        if self.num_preemptions == preempted_before:
            extends += self._admit_waiting(budget)
        operations, self._operations = tuple(self._operations), []
        windows = tuple(Decode(s.slot, s.drafts) for s in decodes)
        return StepPlan(operations, windows, tuple(extends))

    def commit(
        self, plan: StepPlan, tokens: Mapping[int, Seq[int]], invalid: Collection[int] = ()
    ) -> list[tuple[Sequence, int]]:
        """Take the step's new tokens (by slot); returns the sequences that got some, and how many:
        those behind one that ends a generation are dropped.

        invalid: slots whose logits were not finite. Their KV, cached pages that they found
        included, is not to be trusted: nobody else gets to read it.
        """
        by_slot = {s.slot: s for s in self._active}
        taken: list[tuple[Sequence, int]] = []
        for slot in invalid:
            self.pages.distrust(by_slot[slot], self._active)
        for decode in plan.decodes:
            by_slot[decode.slot].num_computed_tokens += 1
            by_slot[decode.slot].drafts = ()
        for extend in plan.extends:
            sequence = by_slot[extend.slot]
            sequence.num_computed_tokens = extend.start + extend.length
            if sequence.num_uncomputed_tokens == 0:
                sequence.computed_s = time.monotonic()
                self.pages.remember(sequence)
        for slot, token_ids in tokens.items():
            taken.append((by_slot[slot], self._take(by_slot[slot], token_ids)))
        return taken

    def _take(self, sequence: Sequence, token_ids: Seq[int]) -> int:
        """Append new tokens up to one that ends the generation. All but the newest are computed:
        they were the drafts of a window."""
        num_before = len(sequence.token_ids)
        for token_id in token_ids:
            sequence.token_ids.append(token_id)
            if sequence.finish_reason(self.limits.max_model_len) is not None:
                break
        num_taken = len(sequence.token_ids) - num_before
        sequence.num_computed_tokens += num_taken - 1
        return num_taken

    def resume_received(self, sequence: Sequence) -> None:
        """Every row and the first token of a handed-off sequence are here: it decodes now."""
        assert sequence.first_token_id is not None
        sequence.token_ids.append(sequence.first_token_id)
        self.operate(AppendToken(sequence.slot, sequence.first_token_id))
        sequence.num_computed_tokens = len(sequence.request.token_ids)
        sequence.status = Status.RUNNING
        self._transfers.close(sequence)
        self.pages.remember(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Drop a sequence in whatever state; its pages are free for the next plan."""
        self._transfers.close(sequence)
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        elif sequence.status is not Status.FINISHED:
            self._release(sequence)
        sequence.status = Status.FINISHED
        self._by_key.pop(sequence.request.key, None)

    def _release(self, sequence: Sequence) -> None:
        self.operate(Release(sequence.slot))
        self._free_slots.append(sequence.slot)
        self._active.remove(sequence)
        self.pages.give_back(sequence)

    def _schedule_decodes(self) -> list[Sequence]:
        decodes: list[Sequence] = []
        room = self._room_for_drafts()
        for sequence in list(self._active):
            if not sequence.can_decode:
                continue
            sequence.drafts = sequence.drafts[: self._num_verifiable(sequence, room)]
            room -= len(sequence.drafts)
            # The victim is this sequence or a younger one, never one that `decodes` has already.
            while sequence.status is Status.RUNNING and not self._grow(sequence):
                self._preempt(self._victim())
            if sequence.status is Status.RUNNING:
                decodes.append(sequence)
        return decodes

    def _room_for_drafts(self) -> int:
        """Every sequence that decodes gets its one token. Drafts have what is left, or half of it
        where prompts want it too: guesses in every step would keep these waiting for ever."""
        room = self.limits.max_num_batched_tokens - sum(s.can_decode for s in self._active)
        return room // 2 if self._has_prompts else room

    @property
    def _has_prompts(self) -> bool:
        """Whether the next step may compute prompts."""
        if any(s.status is Status.RUNNING and not s.can_decode for s in self._active):
            return True
        return bool(self._waiting and self._free_slots) and not self._waiting[0].awaits_rows

    def _num_verifiable(self, sequence: Sequence, room: int) -> int:
        """Drafts that can come true before a limit ends the generation; the token behind them is
        emitted as well."""
        return max(0, min(room, sequence.num_emittable(self.limits.max_model_len) - 1))

    def _grow(self, sequence: Sequence) -> bool:
        pages = self.pages.grow(sequence)
        if pages is None and sequence.drafts:
            # Nobody loses pages for somebody else's guesses.
            sequence.drafts = ()
            pages = self.pages.grow(sequence)
        if pages:
            self.operate(AddPages(sequence.slot, tuple(pages)))
        return pages is not None

    def _victim(self) -> Sequence:
        """The youngest running sequence; sequences of a running transfer are never preempted."""
        return next(
            s for s in reversed(self._active) if s.status is Status.RUNNING and s.grant is None
        )

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self.wasted_tokens["preempted"] += sequence.num_computed_tokens
        self._release(sequence)
        sequence.num_computed_tokens = 0
        sequence.drafts = ()  # they were meant for the step that it will not be in
        sequence.status = Status.WAITING
        self._waiting.appendleft(sequence)

    def _schedule_extends(self, budget: int) -> list[Extend]:
        extends: list[Extend] = []
        for sequence in self._active:
            if budget <= 0:
                break
            if sequence.status is Status.RUNNING and not sequence.can_decode:
                extends.append(self._chunk(sequence, budget))
                budget -= extends[-1].length
        return extends

    def _chunk(self, sequence: Sequence, budget: int) -> Extend:
        length = min(sequence.num_uncomputed_tokens, budget, self.limits.prefill_chunk_tokens)
        start = sequence.num_computed_tokens
        return Extend(sequence.slot, start, length, start + length == len(sequence.token_ids))

    def _admit_waiting(self, budget: int) -> list[Extend]:
        extends: list[Extend] = []
        while self._waiting and self._free_slots:
            sequence = self._waiting[0]
            computes = not sequence.awaits_rows
            # Every running sequence may need a page soon: admitting into the last ones would only
            # preempt again.
            reserve = len(self._active)
            if (computes and budget <= 0) or not self.pages.take(sequence, num_reserved=reserve):
                break
            self._waiting.popleft()
            self._place(sequence, computes)
            if computes:
                extends.append(self._chunk(sequence, budget))
                budget -= extends[-1].length
        return extends

    def _place(self, sequence: Sequence, computes: bool) -> None:
        request = sequence.request
        sequence.slot = self._free_slots.pop()
        sequence.status = Status.RUNNING if computes else Status.RECEIVING
        if sequence.admitted_s is None:
            sequence.admitted_s = time.monotonic()
            self.queue_waits_s.append(sequence.admitted_s - sequence.arrived_s)
        self._active.append(sequence)
        seed = request.sampling.seed
        assert seed is not None
        self.operate(
            Admit(
                slot=sequence.slot,
                sampling=request.sampling,
                key=sampling_key(seed, request.key.completion),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed=sequence.num_computed_tokens,
                token_ids=tuple(sequence.token_ids),
                pages=tuple(sequence.pages),
            )
        )
        self._transfers.bind(sequence)


def _num_tokens(decodes: Seq[Sequence]) -> int:
    return sum(1 + len(s.drafts) for s in decodes)
