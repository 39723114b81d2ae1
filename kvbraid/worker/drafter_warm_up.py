"""Runs a drafter's kernels once at the sizes of prompts before a worker serves.

A GPU loads a kernel when it is first launched, which takes as long as dozens of decode steps: the
first prompts would pay for it. What windows need, `window_rehearsal` runs.
"""

from __future__ import annotations

import torch

from kvbraid.speculative.proposal import DraftTask
from kvbraid.speculative.proposer import Proposer
from kvbraid.speculative.tap_fusion import TapFusion

# Rows of a prompt; products of other sizes use the kernels of these.
_NUM_ROWS = (1, 16, 64, 128, 256, 1024)
_KEY = "warm-up"


def warm_up_fusion(fusion: TapFusion, dtype: torch.dtype, device: torch.device) -> None:
    """Fuses zeros; nothing on a CPU, where nothing is loaded."""
    if device.type == "cpu":
        return
    for num_rows in _NUM_ROWS:
        fusion.fuse(torch.zeros(num_rows, *fusion.tap_shape, dtype=dtype, device=device)).cpu()


def warm_up_proposer(proposer: Proposer, dtype: torch.dtype, device: torch.device) -> None:
    """Drafts behind prompts of zeros, which it forgets; nothing on a CPU."""
    if device.type != "cpu":
        draft_behind_prompts(proposer, dtype)


def draft_behind_prompts(proposer: Proposer, dtype: torch.dtype) -> None:
    """A step of each size; no sequence is left."""
    for num_rows in _NUM_ROWS:
        proposer.step(
            [
                DraftTask(
                    key=_KEY,
                    first_position=0,
                    rows=torch.zeros(num_rows, proposer.config.fused_width, dtype=dtype),
                    next_token_ids=(0,) * num_rows,
                    anchor_id=0,
                    num_wanted=proposer.max_draft_tokens,
                )
            ]
        )
    proposer.drop(_KEY)
