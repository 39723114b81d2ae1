"""A toy rank: executes step plans without a model and checks what no real rank could survive.

The token after a prefix is a function of the prefix, so whatever happens to a request, its tokens
must come out the same; rows that are read must be those of the very prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvbraid.engine.rank_executor import StepOutput
from kvbraid.engine.step_plan import (
    AddPages,
    Admit,
    AppendToken,
    BeginSend,
    BindSend,
    CloseGrant,
    EndSend,
    OpenGrant,
    Operation,
    Release,
    StepPlan,
)
from kvbraid.transport.grant import Grant

PAGE = 4


def toy_token(prefix: Seq[int]) -> int:
    """The token after `prefix`."""
    return (sum((i + 1) * t for i, t in enumerate(prefix)) * 7 + len(prefix)) % 1000


def verified(prefix: Seq[int], drafts: Seq[int]) -> tuple[int, ...]:
    """What a window emits: the model's own tokens up to the first that no draft foretold."""
    tokens = [toy_token(prefix)]
    for draft in drafts:
        if draft != tokens[-1]:
            break
        tokens.append(toy_token([*prefix, *tokens]))
    return tuple(tokens)


def expected(prompt: Seq[int], num_tokens: int) -> list[int]:
    """The `num_tokens` tokens after `prompt`."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(toy_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class _Slot:
    token_ids: list[int]
    pages: list[int]


class ToyRank:
    """Executes plans the way a rank does. A row holds a name of the prefix that it was made from.

    poisoned_pages: their rows are not finite. Whatever is computed from one is poisoned too.
    broken_prompts: prefixes after which the logits are not finite. distrusted_pages: pages that
    gave such logits and must not be read again.
    """

    def __init__(self) -> None:
        self.slots: dict[int, _Slot] = {}
        self.operations: list[Operation] = []
        self.poisoned_pages: set[int] = set()
        self.broken_prompts: set[tuple[int, ...]] = set()
        self.distrusted_pages: set[int] = set()
        self.arrivals: dict[bytes, int] = {}
        self.departures: dict[bytes, int | None] = {}
        self._rows: dict[tuple[int, int], int] = {}

    def apply(self, operation: Operation) -> None:
        """One state operation."""
        self.operations.append(operation)
        match operation:
            case Admit():
                assert operation.slot not in self.slots, "two sequences in a slot"
                held = operation.num_computed // PAGE
                assert self.distrusted_pages.isdisjoint(operation.pages[:held]), "found again"
                self._renew(operation.pages[held:])
                self.slots[operation.slot] = _Slot(list(operation.token_ids), list(operation.pages))
            case AddPages():
                self._renew(operation.pages)
                self.slots[operation.slot].pages += operation.pages
            case AppendToken():
                self.slots[operation.slot].token_ids.append(operation.token_id)
            case Release():
                moving = (*self.arrivals.values(), *self.departures.values())
                assert operation.slot not in moving, "pages are reused while rows move"
                del self.slots[operation.slot]
            case _:
                self._apply_to_transfers(operation)

    def _apply_to_transfers(self, operation: Operation) -> None:
        match operation:
            case OpenGrant():
                grant = Grant.from_json(operation.grant)
                self.arrivals[grant.transfer_id] = operation.slot
            case CloseGrant():
                del self.arrivals[operation.transfer_id]
            case BeginSend():
                grant = Grant.from_json(operation.grant)
                assert grant.transfer_id not in self.departures, "begun twice"
                self.departures[grant.transfer_id] = None
            case BindSend():
                self.departures[operation.transfer_id] = operation.slot
            case EndSend():
                del self.departures[operation.transfer_id]

    def _renew(self, pages: tuple[int, ...]) -> None:
        self.poisoned_pages -= set(pages)
        self.distrusted_pages -= set(pages)

    def compute(self, plan: StepPlan) -> StepOutput:
        """The step's tokens."""
        tokens: dict[int, tuple[int, ...]] = {}
        invalid: list[int] = []
        for decode in plan.decodes:
            newest = len(self.slots[decode.slot].token_ids) - 1
            self._attend(decode.slot, newest, newest + 1 + len(decode.drafts), decode.drafts)
        for extend in plan.extends:
            self._attend(extend.slot, extend.start, extend.start + extend.length)
        windows = [(d.slot, d.drafts) for d in plan.decodes]
        for slot, drafts in [*windows, *((e.slot, ()) for e in plan.extends if e.sample)]:
            held = self.slots[slot]
            is_poisoned = not self.poisoned_pages.isdisjoint(held.pages)
            if is_poisoned or tuple(held.token_ids) in self.broken_prompts:
                invalid.append(slot)
                self.distrusted_pages |= set(held.pages)
                continue
            tokens[slot] = verified(held.token_ids, drafts)
            held.token_ids += tokens[slot]
        return StepOutput(tokens, invalid=tuple(invalid))

    def land(self, slot: int, start: int, end: int) -> None:
        """Rows of positions [start, end) arrive from elsewhere."""
        held = self.slots[slot]
        for position, name in enumerate(_prefix_names(held.token_ids[:end])):
            if position >= start:
                self._rows[self._row(held, position)] = name

    def _attend(self, slot: int, start: int, end: int, drafts: Seq[int] = ()) -> None:
        assert slot not in self.arrivals.values(), "computes while rows may still land"
        held = self.slots[slot]
        token_ids = [*held.token_ids, *drafts]
        for position, name in enumerate(_prefix_names(token_ids[:end])):
            row = self._row(held, position)
            if position < start:
                assert self._rows.get(row) == name, f"slot {slot} reads another's row {position}"
            else:
                self._rows[row] = name
        if not self.poisoned_pages.isdisjoint(held.pages):
            self.poisoned_pages |= set(held.pages[start // PAGE :])

    @staticmethod
    def _row(held: _Slot, position: int) -> tuple[int, int]:
        return held.pages[position // PAGE], position % PAGE


def _prefix_names(token_ids: Seq[int]) -> Iterator[int]:
    name = 0
    for token_id in token_ids:
        name = hash((name, token_id))
        yield name
