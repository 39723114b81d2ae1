"""Everything that speaks against a drafter for a target, when the loader has named the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from kvbraid.errors import CheckpointError
from kvbraid.model.config import ModelConfig
from kvbraid.model.loader import load_config
from kvbraid.speculative.drafter_file import read_config_json
from kvbraid.speculative.drafter_source import OpenedDrafter, open_drafter

_TAP_KEYS = (
    "target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids",
    "dspark_target_layer_ids",
)  # fmt: skip


def open_fitting_drafter(path: str, target_path: str) -> OpenedDrafter:
    """The drafter at `path`, made for the model at `target_path`.

    Raises CheckpointError with the loader's reason and every other one that its config.json shows.
    """
    target = load_config(target_path)
    try:
        return open_drafter(path, target)
    except CheckpointError as error:
        more = _further_reasons(path, target, str(error))
        if not more:
            raise
        raise CheckpointError("; ".join([str(error), *more])) from error


def _further_reasons(path: str, target: ModelConfig, first: str) -> list[str]:
    try:
        values = read_config_json(Path(path))
    except CheckpointError:
        return []
    expected = (
        ("vocab_size", target.vocab_size, "the target's vocabulary"),
        ("num_target_layers", target.num_layers, "the target's layers"),
        ("target_hidden_size", target.hidden_size, "the target's width"),
    )
    reasons = [
        f"{key} is {found}, {what} {wanted}"
        for key, wanted, what in expected
        for found in _found(values, key)
        if isinstance(found, int) and found != wanted
    ]
    for key in _TAP_KEYS:
        for ids in _found(values, key):
            if isinstance(ids, list) and any(i >= target.num_layers for i in ids):
                reasons.append(f"{key} is {ids}, the target has {target.num_layers} layers")
    return [reason for reason in reasons if reason.split(" is ")[0] not in first]


def _found(values: Mapping[str, object], key: str) -> Iterator[object]:
    """The values of `key` at the top and in sections."""
    if key in values:
        yield values[key]
    for section in values.values():
        if isinstance(section, Mapping) and key in section:
            yield section[key]
