"""The nested sections of a config.json that the speculators library wrote."""

from __future__ import annotations

from kvbraid.errors import CheckpointError
from kvbraid.model.raw_config import RawConfig
from kvbraid.speculative.drafter_file import DrafterFile

LAYER_SECTION = "transformer_layer_config"
PROPOSAL_SECTION = "speculators_config"

# speculators saves what differs from transformers' defaults, so these may be left out.
TRANSFORMERS_DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "qwen3": {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
    },
}


def read_speculators_layer(file: DrafterFile) -> tuple[RawConfig, str]:
    """The section of the draft layers, transformers' defaults filled in, and its model type."""
    values = file.section(LAYER_SECTION)
    if not values:
        raise CheckpointError(f"{file.origin}: {LAYER_SECTION} is missing")
    raw = RawConfig(values, f"{file.origin} ({LAYER_SECTION})")
    model_type = raw.choice("model_type", tuple(TRANSFORMERS_DEFAULTS), "llama")
    raw = RawConfig(TRANSFORMERS_DEFAULTS[model_type] | values, raw.origin)
    for key in ("model_type", "architectures"):
        raw.value(key)
    return raw, model_type


def read_proposal_length(file: DrafterFile) -> int | None:
    """speculative_tokens of the default proposal method, None where the file names none."""
    section = file.section(PROPOSAL_SECTION)
    methods = section.get("proposal_methods")
    if not methods:
        return None
    origin = f"{file.origin} ({PROPOSAL_SECTION})"
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        raise CheckpointError(f"{origin}: proposal_methods = {methods!r} must be a list of objects")
    wanted = section.get("default_proposal_method")
    chosen = next((one for one in methods if one.get("proposal_type") == wanted), methods[0])
    return RawConfig(chosen, f"{origin}, proposal_methods").optional_integer("speculative_tokens")
