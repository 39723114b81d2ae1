"""Drafters that are bigram tables, built by hand, for targets that are bigram tables.

V tokens. Width 2V + 2: columns [0, V) what the drafter predicts, [V, 2V) the token, one constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbraid.model.config import RopeConfig
from kvbraid.speculative.drafter_config import AnyDrafterConfig
from tests.unit.speculative.drafters.random_drafters import (
    RandomDrafter,
    dspark_config,
    eagle3_config,
    random_drafter,
)

# A key one position away loses 1 - cos(1 / SLOWDOWN) of a sharpness that leaves it e**-60.
SLOWDOWN = 20.0
SHARPNESS = 60 / (1 - math.cos(1 / SLOWDOWN))


def _silent(config: AnyDrafterConfig) -> dict[str, Tensor]:
    """Norms of ones, everything else 0."""
    return {
        name: torch.ones_like(tensor) if "norm" in name else torch.zeros_like(tensor)
        for name, tensor in random_drafter(config).weights.items()
    }


def eagle3_bigram(successors: Sequence[int], max_draft_tokens: int) -> RandomDrafter:
    """Predicts successors[t] after token t.

    One head attends to its own row alone: query and key are one constant pair whose product falls
    with the distance by rotation. Its value is the token; the output projection is the table.
    """
    size = len(successors)
    width, dim = 2 * size + 2, 2 * size
    config = eagle3_config(
        hidden_size=width,
        vocab_size=size,
        draft_vocab_size=size,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=dim,
        rope=RopeConfig(rope_type="linear", theta=1e30, factor=SLOWDOWN),
        max_draft_tokens=max_draft_tokens,
        # The feature fed back holds the prediction before; normed, it is small beside the newest.
        norm_before_residual=True,
    )
    weights = _silent(config)
    constant = width - 1
    weights["embed_tokens.weight"] = _token_rows(size)
    # RMSNorm of a row of two ones leaves sqrt(width / 2) in both places.
    length = math.sqrt(width / 2)
    prefix = "layers.0.self_attn"
    for name in ("q", "k"):
        weights[f"{prefix}.{name}_proj.weight"][0, constant] = (
            math.sqrt(SHARPNESS * math.sqrt(dim)) / length
        )
    for token in range(size):
        weights[f"{prefix}.v_proj.weight"][token, size + token] = 1 / length
        weights[f"{prefix}.o_proj.weight"][successors[token], token] = 100.0
        weights["lm_head.weight"][token, token] = 1.0
    return RandomDrafter(config, weights)


def dspark_bigram(
    successors: Sequence[int], max_draft_tokens: int, *, predicts_from_anchor: bool = True
) -> RandomDrafter:
    """Predicts successors[t] after token t by its Markov head alone; the backbone is silent. The
    mask is one token more than the table has."""
    size = len(successors)
    config = dspark_config(
        vocab_size=size + 1,
        draft_vocab_size=size + 1,
        mask_token_id=size,
        markov_rank=size,
        max_draft_tokens=max_draft_tokens,
        predicts_from_anchor=predicts_from_anchor,
        has_own_embedding=True,
        has_own_head=True,
        has_confidence_head=False,
    )
    weights = _silent(config)
    for token, successor in enumerate(successors):
        weights["markov_head.markov_w1.weight"][token, token] = 1.0
        weights["markov_head.markov_w2.weight"][successor, token] = 1.0
    return RandomDrafter(config, weights)


def _token_rows(size: int) -> Tensor:
    rows = torch.zeros(size, 2 * size + 2)
    rows[:, size : 2 * size] = torch.eye(size)
    rows[:, -1] = 1.0
    return rows
