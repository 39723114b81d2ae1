"""A loaded drafter of either kind."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from kvbraid.errors import ConfigError
from kvbraid.model.config import ModelConfig
from kvbraid.model.loader import SUPPORTED_DTYPES, open_checkpoint
from kvbraid.model.tensor_source import TensorSource
from kvbraid.model.weight_reader import WeightReader
from kvbraid.speculative.draft_graphs import DraftGraphs
from kvbraid.speculative.draft_kv import DraftKv
from kvbraid.speculative.draft_session import DraftSession
from kvbraid.speculative.drafter_config import AnyDrafterConfig, Eagle3Config
from kvbraid.speculative.drafter_source import open_drafter
from kvbraid.speculative.dspark import DSparkDrafter
from kvbraid.speculative.eagle3 import Eagle3Drafter
from kvbraid.speculative.vocabulary_weights import load_vocabulary


class Drafter(Protocol):
    """Weights of a drafter, whole on one device; threads may share it."""

    @property
    def config(self) -> AnyDrafterConfig:
        """What its checkpoint says."""
        ...

    @property
    def window(self) -> int:
        """Tokens a sequence that one forward runs, all of which see one another."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and KV."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    def open_session(self, kv: DraftKv, graphs: DraftGraphs | None = None) -> DraftSession:
        """Drafting on a KV of this drafter's shape; in captured graphs where `graphs` are given."""
        ...


def load_drafter(
    path: str | Path,
    target_path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Drafter:
    """The drafter at `path`; embedding and head that its file lacks are read from its target's.

    Raises CheckpointError for either checkpoint, naming what is wrong, and ConfigError for a dtype.
    """
    target, target_source = open_checkpoint(target_path)
    opened = open_drafter(path, target)
    return build_drafter(
        opened.config, opened.source, target, target_source, dtype=dtype, device=device
    )


def build_drafter(
    config: AnyDrafterConfig,
    source: TensorSource,
    target: ModelConfig,
    target_source: TensorSource,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Drafter:
    """The drafter that `config` describes, from a source with canonical names; see load_drafter."""
    if dtype not in SUPPORTED_DTYPES:
        accepted = ", ".join(str(accepted) for accepted in SUPPORTED_DTYPES)
        raise ConfigError(f"drafter dtype {dtype} is not supported; accepted: {accepted}")
    reader = WeightReader(source, dtype=dtype, device=torch.device(device))
    vocabulary = load_vocabulary(
        reader,
        WeightReader(target_source, dtype=dtype, device=torch.device(device)),
        config,
        is_target_tied=target.tie_word_embeddings,
    )
    if isinstance(config, Eagle3Config):
        return Eagle3Drafter(config, reader, vocabulary)
    return DSparkDrafter(config, reader, vocabulary)
