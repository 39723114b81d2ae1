"""What verify steps cost on this machine, timed for a moment before a decode worker serves.

The adaptive policy then begins with measured costs of the usual batch sizes and widths, instead of
trying them on its first clients. What drafts came true does not count, and what was not reached in
time is learnt in use. Where steps are compiled, `window_rehearsal` runs all of them instead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvbraid.engine.drafted_decoding import DraftedDecoding
from kvbraid.engine.sequence import SequenceKey
from kvbraid.speculative.cost_table import CostGrid, profile_cells
from kvbraid.speculative.draft_policy import DraftPlan, DraftPolicy, StepOutcome
from kvbraid.speculative.fixed_policy import FixedPolicy
from kvbraid.worker.start_up_generation import generate_to_the_end
from kvbraid.worker.worker import Worker

logger = logging.getLogger(__name__)

# A plain step's price needs three observations, any other two (`cost_table`).
_NUM_PLAIN = 3
_NUM_DRAFTED = 2
# Long enough for every drafter to draft, short enough to cost little.
_NUM_PROMPT_TOKENS = 8
# Accepted drafts end a generation before its last width; what is left comes in the next one.
_MAX_ROUNDS = 8
_NAME = "cost-profile"


class ProfilePolicy(FixedPolicy):
    """Goes through the widths that are to be timed, one a step, the widest first: the last tokens
    of a generation leave no room for them. Used by the engine thread."""

    def __init__(
        self,
        widths: Sequence[int],
        num_sequences: int,
        observe: Callable[[StepOutcome], None],
    ) -> None:
        """num_sequences: of the steps that count; observe: gets every executed step."""
        super().__init__(max(widths) - 1, observe)
        self.pending = deque(sorted(widths, reverse=True))
        self._has_room = False
        self._num_sequences = num_sequences

    def plan(self, slots: Sequence[int], limits: Sequence[int]) -> DraftPlan:
        """The next width."""
        width = self.pending[0] if self.pending else 1
        self._has_room = min(limits) >= width - 1
        return DraftPlan(tuple(min(limit, width - 1) for limit in limits), width)

    def record(self, outcome: StepOutcome) -> None:
        """See Policy. A width that the drafter gave nothing for is not tried again."""
        super().record(outcome)
        if self.pending and self._has_room and len(outcome.slots) == self._num_sequences:
            self.pending.popleft()


async def profile_costs(
    worker: Worker, speculation: DraftedDecoding, prompt: Sequence[int], *, limit_s: float
) -> None:
    """Time decode steps by number of sequences and width, the cheapest first, for limit_s seconds
    and what an estimate was off by. Nothing else may run meanwhile."""
    policy = speculation.policy
    if not isinstance(policy, DraftPolicy) or limit_s == 0:
        return
    began = time.monotonic()
    num_steps = 0
    for size, widths in widths_by_size(_most_sequences(worker), policy.costs.max_width):
        pending: Sequence[int] = widths
        for number in range(_MAX_ROUNDS):
            left_s = limit_s - (time.monotonic() - began)
            pending = _fitting(pending, size, policy.costs.step, left_s)
            if not pending:
                break
            profile = speculation.policy = ProfilePolicy(pending, size, policy.observe_seconds)
            runs = (
                _generate(worker, prompt, _num_tokens(pending), size * _MAX_ROUNDS + number, index)
                for index in range(size)
            )
            await asyncio.gather(*runs)
            num_steps += len(pending) - len(profile.pending)
            pending = tuple(profile.pending)
    speculation.policy = policy
    logger.info("timed %d steps in %.1f s", num_steps, time.monotonic() - began)


def widths_by_size(max_sequences: int, max_width: int) -> list[tuple[int, list[int]]]:
    """Of each number of sequences the widths to time, each as often as it takes to count."""
    by_size: dict[int, list[int]] = {}
    for size, width in sorted(profile_cells(max_sequences, max_width)):
        by_size.setdefault(size, []).extend([width] * (_NUM_PLAIN if width == 1 else _NUM_DRAFTED))
    return list(by_size.items())


def _fitting(
    widths: Sequence[int], num_sequences: int, costs: CostGrid, left_s: float
) -> tuple[int, ...]:
    """Those that will be over before the time is, by an estimate from above; cheapest first."""
    seconds = costs.seconds(num_sequences)
    if seconds is None:
        return tuple(widths) if left_s > 0 else ()
    fitting = []
    for width in sorted(widths):
        left_s -= float(seconds[width - 1])
        if left_s < 0:
            break
        fitting.append(width)
    return tuple(fitting)


def _most_sequences(worker: Worker) -> int:
    """As many as may run and as the pool has room for, while every one gets some tokens."""
    identity = worker.identity
    num_tokens = 16 * _NUM_PROMPT_TOKENS
    return max(1, min(identity.max_num_seqs, identity.num_pool_tokens // num_tokens))


def _num_tokens(widths: Sequence[int]) -> int:
    """One a step, the prompt's own, and room for the widest: accepted drafts take steps away."""
    return 1 + max(len(widths), max(widths)) + 1


async def _generate(
    worker: Worker, prompt: Sequence[int], max_tokens: int, number: int, index: int
) -> None:
    room = worker.identity.max_model_len - max_tokens
    token_ids = prompt[: min(_NUM_PROMPT_TOKENS, max(1, room))]
    await generate_to_the_end(worker, SequenceKey(_NAME, number, index), token_ids, max_tokens)
