"""Builds a proposer, and decides whether its steps run as captured graphs: once, at start-up, with
the reason why not."""

from __future__ import annotations

import logging
from typing import Literal

from kvbraid.engine.cuda_graph import CudaGraphCapture
from kvbraid.errors import ConfigError
from kvbraid.speculative.draft_graphs import DraftGraphs
from kvbraid.speculative.drafter import Drafter
from kvbraid.speculative.proposer import Proposer

logger = logging.getLogger(__name__)


def build_proposer(
    drafter: Drafter,
    *,
    cuda_graphs: Literal["auto", "always", "never"],
    num_kv_tokens: int,
    max_sequences: int,
    max_len: int,
) -> Proposer:
    """max_len: most tokens of a sequence. Other arguments as in Proposer.

    `auto` takes graphs on GPUs wherever an attention backend can be captured, and says so once
    where none can. Raises ConfigError for impossible sizes, where no attention serves, or where
    graphs were asked for and cannot be had.
    """
    if cuda_graphs == "never" or (cuda_graphs == "auto" and drafter.device.type != "cuda"):
        return Proposer(drafter, num_kv_tokens=num_kv_tokens, max_sequences=max_sequences)
    try:
        graphs = DraftGraphs(CudaGraphCapture(), max_len)
        return Proposer(
            drafter, num_kv_tokens=num_kv_tokens, max_sequences=max_sequences, graphs=graphs
        )
    except ConfigError as error:
        if cuda_graphs == "always":
            raise ConfigError(
                f"cuda_graphs is always, but draft steps cannot be captured: {error}; accepted "
                "here: auto, never"
            ) from error
        logger.warning("drafts run without CUDA graphs: %s", error)
    return Proposer(drafter, num_kv_tokens=num_kv_tokens, max_sequences=max_sequences)
