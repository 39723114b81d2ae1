"""Every verify window at every usual batch size, run before a worker on a GPU serves.

A window's first step compiles kernels and captures a graph, which takes as long as a hundred plain
steps: no client is to wait for that. What the steps after it took goes into the policy's cost
table, so that no client's tokens are spent on trying widths either. What drafts came true does not
count: all sequences generate one text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence

from kvbraid.engine.drafted_decoding import DraftedDecoding
from kvbraid.engine.sequence import SequenceKey
from kvbraid.speculative.draft_policy import DraftPolicy
from kvbraid.speculative.fixed_policy import FixedPolicy
from kvbraid.worker.start_up_generation import generate_to_the_end
from kvbraid.worker.worker import Worker, WorkerIdentity

logger = logging.getLogger(__name__)

# Larger batches seldom draft, and learn in use.
_MOST_SEQUENCES = 64
# The first one is slow, and of the others the median counts.
_NUM_STEPS = 4
# What is left after so long is met in use.
_LONGEST_S = 60.0
_NAME = "window-rehearsal"
_NO_DRAFTS = 1 << 30


async def rehearse_windows(
    worker: Worker, speculation: DraftedDecoding, prompt: Sequence[int]
) -> None:
    """Run the windows that the adaptive policy may choose. Nothing else may run meanwhile."""
    policy = speculation.policy
    if not isinstance(policy, DraftPolicy):
        return
    began = time.monotonic()
    number = 0
    for size in batch_sizes(worker.identity, len(prompt) + _num_tokens(policy.max_draft_tokens)):
        if time.monotonic() - began > _LONGEST_S:
            break
        for num_drafts, fixed in _windows(policy):
            speculation.policy = fixed
            runs = (_generate(worker, prompt, num_drafts, number, i) for i in range(size))
            await asyncio.gather(*runs)
            number += 1
    speculation.policy = policy
    logger.info("rehearsed %d windows in %.1f s", number, time.monotonic() - began)


def _windows(policy: DraftPolicy) -> Iterator[tuple[int, FixedPolicy]]:
    """Numbers of drafts, and who drafts so many and tells `policy` what it took."""
    for num_drafts in range(policy.max_draft_tokens, 0, -1):
        yield num_drafts, FixedPolicy(num_drafts, policy.observe_seconds)
    # Plain steps come last, so that their price is fresh: those before drafts, which keep taps,
    # and those that count, with no drafts in sight.
    yield 0, FixedPolicy(0)
    yield 0, FixedPolicy(0, observe_plain=policy.observe_plain, steps_to_drafts=_NO_DRAFTS)


def batch_sizes(identity: WorkerIdentity, num_tokens: int) -> list[int]:
    """Powers of two and the most sequences that run, as far as the pool holds so many of
    num_tokens tokens."""
    most = min(identity.max_num_seqs, _MOST_SEQUENCES, identity.num_pool_tokens // num_tokens)
    sizes = {1 << i for i in range(max(0, most).bit_length())}
    return sorted(sizes | {most} - {0})


def _num_tokens(num_drafts: int) -> int:
    """Enough for the steps, should all drafts come true."""
    return _NUM_STEPS * (num_drafts + 1) + 1


async def _generate(
    worker: Worker, prompt: Sequence[int], num_drafts: int, number: int, index: int
) -> None:
    max_tokens = _num_tokens(num_drafts)
    token_ids = prompt[: max(1, worker.identity.max_model_len - 1 - max_tokens)]
    await generate_to_the_end(worker, SequenceKey(_NAME, number, index), token_ids, max_tokens)
