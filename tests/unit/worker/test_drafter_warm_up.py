"""A warmed drafter has drafted at the sizes of prompts and batches and holds nothing of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvbraid.speculative.drafter_config import AnyDrafterConfig
from kvbraid.speculative.proposal import Answer, DraftSampling, DraftTask, Proposal
from kvbraid.speculative.proposer import Proposer
from kvbraid.worker.drafter_warm_up import (
    draft_behind_prompts,
    draft_in_batches,
    warm_up_proposer,
)
from tests.unit.engine.rerun_graphs import RerunGraphs
from tests.unit.speculative.drafters.captured_proposers import captured_proposer
from tests.unit.speculative.drafters.random_drafters import (
    dspark_config,
    eagle3_config,
    random_drafter,
)
from tests.unit.speculative.drafters.streams import random_stream


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
    draft_behind_prompts(cast(Proposer, cast(Any, drafter)), torch.bfloat16, max_len=4096)
    assert not drafter.held
    sizes = [len(task.rows) for task in drafter.tasks]
    assert (sizes[0], sizes[-1]) == (1, 1024)
    assert all(task.num_wanted == 2 and task.first_position == 0 for task in drafter.tasks)


def test_a_cpu_has_nothing_to_load() -> None:
    drafter = Recorder()
    warm_up_proposer(
        cast(Proposer, cast(Any, drafter)),
        torch.float32,
        torch.device("cpu"),
        max_drafts=2,
        max_len=64,
    )
    assert not drafter.tasks


@pytest.mark.parametrize("config", [eagle3_config(), dspark_config()], ids=["eagle3", "dspark"])
def test_prompts_are_no_longer_than_sequences_may_be(config: AnyDrafterConfig) -> None:
    """Graphs have no room for more, where the KV has it; what is within needs no new one."""
    graphs, max_len = RerunGraphs(), 40
    proposer = captured_proposer(
        random_drafter(config).load(), graphs, max_len=max_len, num_kv_tokens=2048, max_sequences=4
    )
    draft_behind_prompts(proposer, torch.float32, max_len)
    assert proposer.num_sequences == 0
    captured = graphs.num_captures
    stream = random_stream("a", max_len, config.hidden_size, seed=1)
    for num_rows in range(1, max_len + 1):
        proposer.step([stream.task(num_rows, proposer.max_draft_tokens, first=0)])
    assert graphs.num_captures == captured


@pytest.mark.parametrize("config", [eagle3_config(), dspark_config()], ids=["eagle3", "dspark"])
def test_no_graph_is_captured_once_it_is_warm(config: AnyDrafterConfig) -> None:
    """Whatever batch comes, after windows of any width."""
    graphs, most, max_drafts = RerunGraphs(), 6, 3
    proposer = captured_proposer(
        random_drafter(config).load(), graphs, max_len=64, num_kv_tokens=640, max_sequences=most
    )
    free = proposer.num_free_tokens
    draft_in_batches(proposer, torch.float32, max_drafts)
    assert (proposer.num_sequences, proposer.num_free_tokens) == (0, free)
    captured = graphs.num_captures
    streams = [random_stream(str(i), 60, config.hidden_size, i) for i in range(most)]
    for num_sequences in range(1, most + 1):
        for num_drafts in range(max_drafts + 1):
            for sampling in (DraftSampling(), DraftSampling(0.7, 3)):
                proposer.step(
                    [
                        s.task(1 + i % (num_drafts + 1), num_drafts, first=0, sampling=sampling)
                        for i, s in enumerate(streams[:num_sequences])
                    ]
                )
    assert graphs.num_captures == captured
