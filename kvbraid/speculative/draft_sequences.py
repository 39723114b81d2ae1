"""Which sequences a drafter holds, from which position to which, and who makes room for whom."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from kvbraid.speculative.draft_kv import DraftKv
from kvbraid.speculative.proposal import Answer, DraftTask, Proposal, Resync


@dataclass(slots=True)
class DraftSequence:
    """Rows of absolute positions [base, end) are held, in the KV's `slot`, at index p - base."""

    slot: int
    base: int
    end: int


class DraftSequences:
    """Sequences by key, least recently used first."""

    def __init__(self, kv: DraftKv, max_sequences: int) -> None:
        self._kv = kv
        self._free_slots = list(reversed(range(max_sequences)))
        self._by_key: OrderedDict[str, DraftSequence] = OrderedDict()
        self.num_evicted = 0
        """Sequences that lost their rows for others' room, since the start."""

    def __len__(self) -> int:
        return len(self._by_key)

    def place(self, task: DraftTask, in_step: Collection[str]) -> DraftSequence | Answer:
        """The task's sequence, holding nothing from the task's first position on; or the answer
        if rows before it are missing, or `in_step`, the keys that may not be evicted, leave no
        place."""
        first = task.first_position
        sequence = self._by_key.get(task.key)
        if sequence is None:
            if first > 0 and not task.starts_cold:
                return Resync(0)
            sequence = self._create(first, in_step)
            if sequence is None:
                return Proposal()
            self._by_key[task.key] = sequence
        self._by_key.move_to_end(task.key)
        if task.starts_cold or first < sequence.base:
            self._restart(sequence, first)
        elif first > sequence.end:
            return Resync(sequence.end)
        sequence.end = first
        return sequence

    def fit(
        self, sequence: DraftSequence, end: int, num_more: int, in_step: Collection[str]
    ) -> bool:
        """Make room for rows up to position `end` and num_more behind them, by evicting others.

        Where that is impossible the sequence forgets what it holds and goes on cold from `end`:
        it does not ask for rows again that would not fit either.
        """
        num_rows = end - sequence.base + num_more
        missing = self._kv.missing_pages(sequence.slot, num_rows)
        if missing > self._kv.num_free_pages and not self._make_room(missing, in_step):
            self._restart(sequence, end)
            return False
        self._kv.resize(sequence.slot, num_rows)
        return True

    def drop(self, key: str) -> None:
        """Forget a sequence; an unknown key is ignored."""
        sequence = self._by_key.pop(key, None)
        if sequence is not None:
            self._kv.resize(sequence.slot, 0)
            self._free_slots.append(sequence.slot)

    def _create(self, first: int, in_step: Collection[str]) -> DraftSequence | None:
        if not self._free_slots:
            oldest = next((key for key in self._by_key if key not in in_step), None)
            if oldest is None:
                return None
            self._evict(oldest)
        return DraftSequence(self._free_slots.pop(), first, first)

    def _restart(self, sequence: DraftSequence, first: int) -> None:
        self._kv.resize(sequence.slot, 0)
        sequence.base = sequence.end = first

    def _make_room(self, num_pages: int, in_step: Collection[str]) -> bool:
        """Evict sequences outside the step, oldest first, until num_pages are free; none at all
        where that would not be enough."""
        victims = []
        num_free = self._kv.num_free_pages
        for key, sequence in self._by_key.items():
            if num_free >= num_pages:
                break
            if key not in in_step:
                victims.append(key)
                num_free += self._kv.num_pages(sequence.slot)
        if num_free < num_pages:
            return False
        for key in victims:
            self._evict(key)
        return True

    def _evict(self, key: str) -> None:
        self.num_evicted += 1
        self.drop(key)
