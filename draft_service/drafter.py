"""From settings to a proposer and the terms on which it drafts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from draft_service.config import DraftConfig
from draft_service.misfit import open_fitting_drafter
from kvbraid.errors import ConfigError
from kvbraid.model.loader import load_config, model_digest
from kvbraid.speculative.drafter import load_drafter
from kvbraid.speculative.drafter_config import AnyDrafterConfig
from kvbraid.speculative.proposer import Proposer
from kvbraid.transport.draft_terms import DraftTerms
from kvbraid.worker.drafter_terms import drafter_terms
from kvbraid.worker.drafter_warm_up import warm_up_proposer
from kvbraid.worker.memory import free_bytes
from kvbraid.worker.proposer_assembly import build_proposer
from kvbraid.worker.rank_compute import compute_device, compute_dtype

# Of a message, for everything but its rows.
_MESSAGE_OVERHEAD_BYTES = 16384


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter that can be asked."""

    proposer: Proposer
    terms: DraftTerms
    num_kv_tokens: int
    device: torch.device


def load(config: DraftConfig, epoch: int) -> LoadedDrafter:
    """Load the drafter that `config` names and make its KV pool. Takes seconds.

    Raises ConfigError for settings, CheckpointError for a checkpoint that is wrong or was made for
    another target.
    """
    path, target_path = config.draft.require_drafter(), config.model.model
    opened = open_fitting_drafter(path, target_path)
    target = load_config(target_path)
    device = compute_device(config.model, 0)
    dtype = compute_dtype(config.model, device)
    drafter = load_drafter(path, target_path, dtype=dtype, device=device)
    max_position = config.model.max_model_len or target.max_position_embeddings
    num_tokens = _num_kv_tokens(config, opened.config, max_position, dtype, device)
    terms = drafter_terms(
        opened,
        epoch=epoch,
        target_digest=model_digest(target_path),
        dtype=dtype,
        max_draft_tokens=_max_draft_tokens(config, opened.config),
        max_rows_per_message=_max_rows(config, opened.config.fused_width * dtype.itemsize),
        max_sequences=config.draft.max_sequences,
        max_position=max_position,
    )
    proposer = build_proposer(
        drafter,
        cuda_graphs=config.draft.cuda_graphs,
        num_kv_tokens=num_tokens,
        max_sequences=config.draft.max_sequences,
        max_len=max_position,
    )
    warm_up_proposer(
        proposer, dtype, device, max_drafts=terms.max_draft_tokens, max_len=max_position
    )
    return LoadedDrafter(proposer, terms, num_tokens, device)


def model_name(config: DraftConfig) -> str:
    """The name that people call the drafter by."""
    return config.model.served_model_name or Path(config.draft.drafter).name


def _max_draft_tokens(config: DraftConfig, drafter: AnyDrafterConfig) -> int:
    asked = config.draft.max_draft_tokens
    if asked > drafter.max_draft_tokens:
        raise ConfigError(
            f"max_draft_tokens is {asked}, accepted: up to {drafter.max_draft_tokens}, for which "
            f"the drafter was trained"
        )
    return asked or drafter.max_draft_tokens


def _max_rows(config: DraftConfig, row_bytes: int) -> int:
    fitting = (config.server.max_message_bytes - _MESSAGE_OVERHEAD_BYTES) // row_bytes
    if fitting < 1:
        raise ConfigError(
            f"max_message_bytes {config.server.max_message_bytes} holds no row of {row_bytes} bytes"
        )
    return min(config.draft.max_rows_per_message, fitting)


def _num_kv_tokens(
    config: DraftConfig,
    drafter: AnyDrafterConfig,
    max_position: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """As set, or as many as are useful and fit."""
    settings = config.draft
    if settings.draft_kv_tokens:
        return settings.draft_kv_tokens
    mla = drafter.mla
    width = mla.latent_width if mla else 2 * drafter.num_kv_heads * drafter.head_dim
    token_bytes = drafter.num_layers * width * dtype.itemsize
    fitting = int(free_bytes(device) * settings.draft_memory_fraction) // token_bytes
    if fitting < 1:
        raise ConfigError(
            f"draft_memory_fraction {settings.draft_memory_fraction} of {free_bytes(device)} free "
            f"bytes holds no token of {token_bytes} bytes; raise it, or set draft_kv_tokens"
        )
    return min(fitting, settings.max_sequences * max_position)
