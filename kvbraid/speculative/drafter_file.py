"""What a drafter's folder holds before its dialect is known: config.json and named tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvbraid.errors import CheckpointError
from kvbraid.model.config import ModelConfig
from kvbraid.model.hf_config import INERT_KEYS
from kvbraid.model.raw_config import RawConfig
from kvbraid.model.tensor_source import StoredTensor

# Keys of drafters that only training, or the tool that wrote the file, reads.
DRAFTER_INERT_KEYS = INERT_KEYS | {
    "_attn_implementation",
    "_torchspec_version",
    "base_model_ep_plan",
    "base_model_pp_plan",
    "base_model_tp_plan",
    "ce_loss_alpha",
    "confidence_head_alpha",
    "embed_requires_grad",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "has_no_defaults_at_init",
    "is_decoder",
    "is_encoder_decoder",
    "l1_loss_alpha",
    "loss_decay_gamma",
    "max_anchors",
    "max_window_layers",
    "num_anchors",
    "speculators_version",
    "step_loss_decay",
    "target_model_name_or_path",
}

DECLARATIONS_KEY = "kvbraid"


@dataclass(frozen=True, slots=True)
class Declarations:
    """What the operator says about a file that does not say it itself: config.json's "kvbraid".

    aux_ids: "output_of_layer" or "input_of_layer", None when not said. draft_ids_are_first: draft
    id j is target id j although the draft vocabulary is smaller.
    """

    aux_ids: str | None = None
    draft_ids_are_first: bool = False


@dataclass(frozen=True, slots=True)
class DrafterFile:
    """values: config.json. tensors: by canonical name. target: the model that is drafted for."""

    values: Mapping[str, object]
    origin: str
    tensors: Mapping[str, StoredTensor]
    target: ModelConfig
    declared: Declarations

    def section(self, key: str) -> dict[str, object]:
        """The JSON object at `key`, empty when absent or null."""
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.origin}: {key} = {value!r} must be a JSON object")
        return value

    def top_level(self, *, without: tuple[str, ...] = ()) -> RawConfig:
        """config.json without some keys, which are read elsewhere."""
        left_out = {*without, DECLARATIONS_KEY}
        values = {key: value for key, value in self.values.items() if key not in left_out}
        return RawConfig(values, self.origin)

    def merged_with(self, key: str, *, without: tuple[str, ...] = ()) -> RawConfig:
        """Top-level keys and those of the section `key`, as one.

        Raises CheckpointError where both have a key and disagree.
        """
        merged = {name: value for name, value in self.values.items() if name not in without}
        for name, value in self.section(key).items():
            if name in without:
                continue
            if merged.get(name) is not None and merged[name] != value:
                raise CheckpointError(
                    f"{self.origin}: {key}.{name} = {value!r} is refused: "
                    f"{name} = {merged[name]!r} disagrees with it"
                )
            merged[name] = value
        for left_out in (key, DECLARATIONS_KEY):
            merged.pop(left_out, None)
        return RawConfig(merged, self.origin)


def read_config_json(folder: Path) -> dict[str, object]:
    """`folder`/config.json. Raises CheckpointError naming it when it is not a JSON object."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not a readable config.json: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(values).__name__}")
    return values


def read_declarations(values: Mapping[str, object], origin: str) -> Declarations:
    """The operator's section of config.json. Raises CheckpointError on an unknown key or value."""
    section = values.get(DECLARATIONS_KEY)
    if section is None:
        return Declarations()
    if not isinstance(section, dict):
        raise CheckpointError(f"{origin}: {DECLARATIONS_KEY} = {section!r} must be a JSON object")
    raw = RawConfig(section, f"{origin} ({DECLARATIONS_KEY})")
    aux_ids = raw.choice("aux_layer_ids", ("output_of_layer", "input_of_layer"), "")
    vocabulary = raw.choice("draft_vocabulary", ("first_ids",), "")
    raw.finish(())
    return Declarations(aux_ids or None, vocabulary == "first_ids")
