"""Which rows of prompts a prefill worker keeps and pushes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from kvbraid.engine.prompt_rows import PromptRows
from kvbraid.engine.sequence import EngineRequest, Sequence, SequenceKey
from kvbraid.kv.slots import LogicalSlots
from kvbraid.speculative.fused_rows import FusedRows
from kvbraid.transport.draft_grant import DraftGrant

PAGE, WIDTH = 4, 2


class Outlet:
    """Writes down what is pushed: (first position, values, whether it starts cold)."""

    def __init__(self) -> None:
        self.pushed: list[tuple[int, list[float], bool]] = []

    def begin(self, grant: DraftGrant) -> None:
        pass

    def push(
        self,
        transfer_id: bytes,
        first_position: int,
        rows: Tensor,
        next_token_ids: Seq[int],
        *,
        starts_cold: bool = False,
    ) -> None:
        assert len(next_token_ids) == len(rows)
        self.pushed.append((first_position, rows[:, 0].tolist(), starts_cold))

    def finish(self, transfer_id: bytes) -> None:
        pass

    def cancel(self, transfer_id: bytes) -> None:
        pass


class Worker:
    """Computes prompts of three tokens, each in a page of its own."""

    def __init__(self) -> None:
        self.outlet = Outlet()
        self.rows = FusedRows(WIDTH, num_slots=4096, logical_page_size=PAGE, dtype=torch.float32)
        self.num_with_rows = 0
        self.prompts = PromptRows(self.outlet, self.rows, logical_page_size=PAGE)
        self.num_prompts = 0

    def queue(self, *, granted: bool) -> Sequence:
        """A prompt that waits."""
        self.num_prompts += 1
        number = self.num_prompts
        grant = DraftGrant("nowhere:1", bytes(16), 1, str(number), "float32", 16)
        request = SimpleNamespace(
            key=SequenceKey(str(number), 0, 0),
            token_ids=(5, 6, 7),
            destination=SimpleNamespace(draft=grant if granted else None),
        )
        sequence: Any = SimpleNamespace(
            request=request,
            token_ids=[5, 6, 7],
            pages=[number],
            num_computed_tokens=0,
        )
        self.prompts.queued(cast(EngineRequest, request))
        return cast(Sequence, sequence)

    def compute(self, sequence: Sequence) -> None:
        """All of it in one step, and the first token; then it ends."""
        first = sequence.pages[0] * PAGE
        rows = torch.arange(first, first + 3.0)[:, None].expand(-1, WIDTH)
        if self.prompts.wants_prompt_taps:
            self.rows.take(LogicalSlots(np.arange(first, first + 3)), rows)
            self.num_with_rows += 1
        sequence.num_computed_tokens = 3
        sequence.token_ids.append(8)
        self.prompts.draft([sequence])
        self.prompts.drop(sequence)

    def serve(self, *, granted: bool) -> None:
        self.compute(self.queue(granted=granted))


def test_the_rows_of_a_granted_prompt_are_pushed() -> None:
    worker = Worker()
    worker.serve(granted=True)
    assert worker.outlet.pushed == [(0, [4.0, 5.0, 6.0], False)]


def test_where_nobody_drafts_no_rows_are_made() -> None:
    worker = Worker()
    for _ in range(1000):
        worker.serve(granted=False)
    assert worker.num_with_rows < 8
    assert not worker.outlet.pushed


def test_the_first_prompt_to_be_drafted_for_again_has_all_its_rows() -> None:
    worker = Worker()
    for _ in range(200):
        worker.serve(granted=False)
    worker.serve(granted=True)
    (pushed,) = worker.outlet.pushed
    first = 201.0 * PAGE
    assert pushed == (0, [first, first + 1, first + 2], False)


def test_rows_of_a_prompt_that_waits_behind_many_are_kept() -> None:
    worker = Worker()
    waiting = worker.queue(granted=True)
    others = [worker.queue(granted=False) for _ in range(200)]
    for other in others:
        worker.compute(other)
    worker.compute(waiting)
    assert worker.outlet.pushed == [(0, [4.0, 5.0, 6.0], False)]


def test_a_prefix_of_a_time_without_drafts_starts_cold() -> None:
    worker = Worker()
    for _ in range(200):
        worker.serve(granted=False)
    sequence = worker.queue(granted=True)
    # Its first page was computed by the 100th prompt, which nobody drafted for.
    sequence.pages[:] = [100, 201]
    sequence.token_ids[:] = list(range(7))
    cast(Any, sequence.request).token_ids = tuple(range(7))
    worker.rows.take(LogicalSlots(np.arange(804, 807)), torch.ones(3, WIDTH))
    sequence.num_computed_tokens = 7
    sequence.token_ids.append(9)
    worker.prompts.draft([sequence])
    assert worker.outlet.pushed == [(4, [1.0, 1.0, 1.0], True)]
