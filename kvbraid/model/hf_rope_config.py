"""The rope settings of a config.json: `rope_parameters` (transformers 5) or the older
`rope_theta` and `rope_scaling`."""

from __future__ import annotations

from kvbraid.model.config import RopeConfig
from kvbraid.model.raw_config import RawConfig

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def read_rope(raw: RawConfig, max_position_embeddings: int) -> RopeConfig:
    """Rope settings of `raw`. Raises CheckpointError on an unknown type or key."""
    values = _rope_values(raw)
    rope = RawConfig(values, f"{raw.origin} (rope settings)")
    legacy = rope.value("type")
    rope_type = rope.choice("rope_type", ROPE_TYPES, _legacy_type(rope, legacy))
    if legacy is not None and legacy != rope_type:
        raise rope.error("type", legacy, f"the same as rope_type = {rope_type!r}")
    top_level_theta = raw.number("rope_theta", 10_000.0)
    theta = rope.number("rope_theta", top_level_theta)
    rope.fixed("partial_rotary_factor", 1.0)
    config = _read_type(rope, rope_type, theta, max_position_embeddings)
    rope.finish(())
    return config


def _rope_values(raw: RawConfig) -> dict[str, object]:
    parameters, scaling = raw.value("rope_parameters"), raw.value("rope_scaling")
    for key, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, dict):
            raise raw.error(key, value, "a JSON object or null")
    if parameters and scaling and parameters != scaling:
        raise raw.error("rope_scaling", scaling, "null, or the same as rope_parameters")
    return dict(parameters or scaling or {})  # type: ignore[call-overload,no-any-return]


def _legacy_type(rope: RawConfig, legacy: object) -> str:
    if legacy is None:
        return "default"
    return rope.choice("type", ROPE_TYPES, "default")


def _read_type(rope: RawConfig, rope_type: str, theta: float, max_positions: int) -> RopeConfig:
    if rope_type == "default":
        return RopeConfig(theta=theta)
    factor = rope.number("factor")
    if factor < 1:
        raise rope.error("factor", factor, "a number >= 1")
    if rope_type == "linear":
        return RopeConfig("linear", theta, factor)
    original = rope.integer("original_max_position_embeddings", max_positions)
    if rope_type == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            factor,
            original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    attention_factor = rope.number("attention_factor") if rope.has("attention_factor") else None
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        truncate=rope.flag("truncate", True),
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        attention_factor=attention_factor,
    )
