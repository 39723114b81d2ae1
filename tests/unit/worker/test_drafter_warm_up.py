"""A warmed drafter has drafted at the sizes of prompts and holds nothing of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from kvbraid.speculative.proposal import Answer, DraftTask, Proposal
from kvbraid.speculative.proposer import Proposer
from kvbraid.worker.drafter_warm_up import draft_behind_prompts, warm_up_proposer


class Recorder:
    config = SimpleNamespace(fused_width=3)
    max_draft_tokens = 2

    def __init__(self) -> None:
        self.tasks: list[DraftTask] = []
        self.held: set[str] = set()

    def step(self, tasks: list[DraftTask]) -> list[Answer]:
        self.tasks += tasks
        self.held |= {task.key for task in tasks}
        return [Proposal()] * len(tasks)

    def drop(self, key: str) -> None:
        self.held.discard(key)


def test_it_drafts_behind_prompts_and_forgets_them() -> None:
    drafter = Recorder()
    draft_behind_prompts(cast(Proposer, cast(Any, drafter)), torch.bfloat16)
    assert not drafter.held
    sizes = [len(task.rows) for task in drafter.tasks]
    assert (sizes[0], sizes[-1]) == (1, 1024)
    assert all(task.num_wanted == 2 and task.first_position == 0 for task in drafter.tasks)


def test_a_cpu_has_nothing_to_load() -> None:
    drafter = Recorder()
    warm_up_proposer(cast(Proposer, cast(Any, drafter)), torch.float32, torch.device("cpu"))
    assert not drafter.tasks
