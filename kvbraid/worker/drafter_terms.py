"""The terms on which a loaded drafter takes rows and drafts, wherever it runs."""

from __future__ import annotations

import torch

from kvbraid.speculative.drafter_config import DSparkConfig
from kvbraid.speculative.drafter_digest import drafter_digest
from kvbraid.speculative.drafter_source import OpenedDrafter
from kvbraid.transport.draft_terms import DraftTerms


def drafter_terms(
    opened: OpenedDrafter,
    *,
    epoch: int,
    target_digest: str,
    dtype: torch.dtype,
    max_draft_tokens: int,
    max_rows_per_message: int,
    max_sequences: int,
    max_position: int,
) -> DraftTerms:
    """epoch: incarnation of the process that drafts. dtype: of rows. Others: see draft.proto."""
    config = opened.config
    return DraftTerms(
        epoch=epoch,
        drafter_kind="dspark" if isinstance(config, DSparkConfig) else "eagle3",
        drafter_digest=drafter_digest(opened),
        target_digest=target_digest,
        hidden_size=config.fused_width,
        row_dtype=str(dtype).removeprefix("torch."),
        tap_layers=config.tap_layers,
        max_draft_tokens=max_draft_tokens,
        predicts_from_anchor=not isinstance(config, DSparkConfig) or config.predicts_from_anchor,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        max_rows_per_message=max_rows_per_message,
        max_sequences=max_sequences,
        max_position=max_position,
    )
