"""The same steps for any proposer: batches that grow and shrink, prompts long and short, cold
starts, rows sent again, gaps, evictions, ended sequences, greedy and drawn drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbraid.speculative.proposal import Answer, DraftSampling, DraftTask, Proposal, Resync
from kvbraid.speculative.proposer import Proposer
from tests.unit.speculative.drafters.streams import Stream, random_stream

NUM_STREAMS, MAX_SEQUENCES, PAGE_SIZE, MAX_LEN = 12, 9, 4, 96
# Full contexts of a third of the sequences: others are evicted.
NUM_KV_TOKENS = 480
SIZES = (1, 9, 2, 5, 3, 8, 1, 4, 7, 6, 1, 9, 5)
NUM_ROUNDS = 39


@dataclass
class Played:
    """What came of each task, in the order of steps."""

    tasks: list[DraftTask] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)


class Script:
    """Makes the tasks of a step from a seed and the answers to the steps before."""

    def __init__(self, proposer: Proposer, seed: int, device: str = "cpu") -> None:
        """device: of every second sequence's rows; the others' are on the host."""
        self._draw = random.Random(seed)
        self._proposer = proposer
        width = proposer.config.hidden_size
        self._streams = [random_stream(f"s{i}", MAX_LEN, width, i) for i in range(NUM_STREAMS)]
        for stream in self._streams[::2]:
            stream.rows = stream.rows.to(device)

    def play(self, before_step: Callable[[], None] = lambda: None) -> Played:
        played = Played()
        for number in range(NUM_ROUNDS):
            joining = self._draw.sample(self._streams, SIZES[number % len(SIZES)])
            tasks = [self._task(stream) for stream in joining]
            before_step()
            answers = self._proposer.step(tasks)
            for stream, answer in zip(joining, answers, strict=True):
                if isinstance(answer, Resync):
                    stream.committed = answer.num_rows
            played.tasks += tasks
            played.answers += answers
        return played

    def _task(self, stream: Stream) -> DraftTask:
        draw, most = self._draw, self._proposer.max_draft_tokens
        if stream.committed > MAX_LEN - 16:
            self._proposer.drop(stream.key)
            stream.committed = 0
        held = stream.committed
        more = draw.choice((1, 7, 55)) if not held else draw.randint(0, 6)
        first = held
        if held and draw.random() < 0.3:
            # Rows sent again, or a gap.
            first = draw.choice((max(0, held - 3), held - 1, held + 2))
        wanted = draw.choice((0, 1, most - 1, most, most + 2))
        return stream.task(
            max(held, first) + more,
            wanted,
            first,
            starts_cold=draw.random() < 0.1,
            sampling=self._sampling(),
        )

    def _sampling(self) -> DraftSampling:
        kind = self._draw.random()
        if kind < 0.5:
            return DraftSampling(wants_law=kind < 0.05)
        key = self._draw.getrandbits(63) - (1 << 62)
        return DraftSampling(self._draw.choice((0.7, 1.0, 1.6)), key, wants_law=kind > 0.97)


def check_same(ours: Played, expected: Played, tolerance: float) -> None:
    """Token for token, and real drafts of every kind among them."""
    assert len(ours.answers) == len(expected.answers) > 4 * NUM_ROUNDS
    for task, answer, other in zip(ours.tasks, ours.answers, expected.answers, strict=True):
        if not isinstance(other, Proposal):
            assert answer == other, task.key
            continue
        assert isinstance(answer, Proposal)
        assert answer.token_ids == other.token_ids, task.key
        torch.testing.assert_close(
            torch.tensor(answer.confidences),
            torch.tensor(other.confidences),
            atol=tolerance,
            rtol=0,
        )
        assert (answer.laws is None) == (other.laws is None)
    kinds = [type(answer) for answer in ours.answers]
    assert kinds.count(Resync) > 3
    drafted = [
        task.sampling
        for task, answer in zip(ours.tasks, ours.answers, strict=True)
        if isinstance(answer, Proposal) and answer.token_ids
    ]
    assert sum(sampling.temperature > 0 for sampling in drafted) > 20
    assert sum(sampling.temperature == 0 for sampling in drafted) > 20


def stored_rows(proposer: Proposer) -> list[Tensor]:
    """Rows of every layer outside the sink page."""
    pool = proposer.kv.pool
    layers = range(pool.spec.num_layers)
    return [part[1:] for i in layers for part in pool.layer(i) if part is not None]
