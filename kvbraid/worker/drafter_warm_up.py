"""Runs a drafter once at all usual sizes before it serves: prompts, batches, numbers of drafts.

A GPU loads a kernel when it is first launched, and a graph is captured when its size is first
needed. Either takes as long as dozens of decode steps: the first requests would pay for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import torch

from kvbraid.speculative.captured_context import MOST_CAPTURED_ROWS
from kvbraid.speculative.padded_fusion import PADDED_SIZES
from kvbraid.speculative.proposal import DraftSampling, DraftTask
from kvbraid.speculative.proposer import Proposer
from kvbraid.speculative.tap_fusion import TapFusion

logger = logging.getLogger(__name__)

# Larger batches seldom draft, and meet their sizes in use.
_MOST_SEQUENCES = 64
# What is left after so long is met in use.
_LONGEST_S = 60.0
_KEY = "warm-up"
_GREEDY = DraftSampling()
_DRAWN = DraftSampling(temperature=1.0, signed_key=1)


def warm_up_fusion(fusion: TapFusion, dtype: torch.dtype, device: torch.device) -> None:
    """Fuses zeros of every size that taps are padded to."""
    for num_rows in PADDED_SIZES:
        fusion.fuse(torch.zeros(num_rows, *fusion.tap_shape, dtype=dtype, device=device)).cpu()


def warm_up_proposer(
    proposer: Proposer,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_drafts: int,
    max_len: int,
) -> None:
    """Drafts up to max_drafts tokens behind at most max_len rows of zeros, which it forgets;
    nothing on a CPU."""
    if device.type == "cpu":
        return
    began = time.monotonic()
    draft_behind_prompts(proposer, dtype, max_len)
    draft_in_batches(proposer, dtype, max_drafts)
    logger.info("the drafter is warm after %.1f s", time.monotonic() - began)


def draft_behind_prompts(proposer: Proposer, dtype: torch.dtype, max_len: int) -> None:
    """A step of each size that rows of prompts are padded to, up to that of max_len rows; no
    sequence is left."""
    for num_rows in _powers_of_two(min(max_len, MOST_CAPTURED_ROWS)):
        proposer.step([_task(proposer, dtype, _KEY, num_rows, proposer.max_draft_tokens)])
    proposer.drop(_KEY)


def draft_in_batches(proposer: Proposer, dtype: torch.dtype, max_drafts: int) -> None:
    """Steps of every usual batch, after windows of every width, greedy and drawn; no sequence is
    left."""
    give_up = time.monotonic() + _LONGEST_S
    for size in _powers_of_two(min(proposer.max_sequences, _MOST_SEQUENCES)):
        if time.monotonic() > give_up:
            return
        keys = [f"{_KEY}-{i}" for i in range(size)]
        for num_drafts in range(1, max_drafts + 1):
            # Windows of which nothing, or all, came true.
            for num_rows, sampling in ((1, _GREEDY), (num_drafts + 1, _DRAWN)):
                proposer.step(
                    [_task(proposer, dtype, key, num_rows, num_drafts, sampling) for key in keys]
                )
        for key in keys:
            proposer.drop(key)


def _powers_of_two(most: int) -> Iterator[int]:
    """And the most."""
    number = 1
    while number < most:
        yield number
        number *= 2
    yield most


def _task(
    proposer: Proposer,
    dtype: torch.dtype,
    key: str,
    num_rows: int,
    num_drafts: int,
    sampling: DraftSampling = _GREEDY,
) -> DraftTask:
    return DraftTask(
        key=key,
        first_position=0,
        rows=torch.zeros(num_rows, proposer.config.fused_width, dtype=dtype),
        next_token_ids=(0,) * num_rows,
        anchor_id=0,
        num_wanted=num_drafts,
        sampling=sampling,
    )
