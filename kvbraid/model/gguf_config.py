"""GGUF metadata -> ModelConfig for the llama, qwen2 and qwen3 architectures."""

from __future__ import annotations

import numpy as np

from kvbraid.errors import CheckpointError
from kvbraid.model.config import ModelConfig, RopeConfig
from kvbraid.model.gguf_file import GgufFile, StringArray
from kvbraid.model.raw_config import RawConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"
# Keys below the architecture's prefix that never change what a forward pass computes.
INERT_KEYS = frozenset({"tensor_data_layout", "rope.scaling.finetuned", "pooling_type"})


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """The model of `file`.

    Raises CheckpointError naming the architecture, rope type or key that is not known.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; accepted: "
            f"{', '.join(ARCHITECTURES)} (load other families from a Hugging Face folder)"
        )
    assert isinstance(architecture, str)
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise CheckpointError(
            f"{file.path}: split.count = {file.metadata['split.count']}: a GGUF split over "
            "several files is refused; merge it with llama-gguf-split --merge"
        )
    prefix = architecture + "."
    values = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    raw = RawConfig(values, f"{file.path} ({architecture}.*)")
    config = _read(raw, file, architecture)
    raw.finish(INERT_KEYS)
    return config


def _read(raw: RawConfig, file: GgufFile, architecture: str) -> ModelConfig:
    hidden_size = raw.integer("embedding_length")
    num_q_heads = raw.integer("attention.head_count")
    num_kv_heads = raw.integer("attention.head_count_kv", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise raw.error("attention.head_count_kv", num_kv_heads, f"a divisor of {num_q_heads}")
    head_dim = raw.integer("attention.key_length", hidden_size // num_q_heads)
    raw.fixed("attention.value_length", head_dim)
    raw.fixed("rope.dimension_count", head_dim)
    raw.fixed("expert_count", 0)
    raw.fixed("expert_used_count", 0)
    raw.fixed("attention.sliding_window", 0)
    raw.fixed("attention.causal", True)
    max_positions = raw.integer("context_length")
    names = file.tensors
    return ModelConfig(
        family=architecture,
        vocab_size=_vocab_size(raw, file),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("feed_forward_length"),
        num_layers=raw.integer("block_count"),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=raw.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=max_positions,
        tie_word_embeddings="output.weight" not in names,
        rope=_read_rope(raw, file, max_positions),
        qkv_bias="blk.0.attn_q.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names,
        qk_norm=architecture == "qwen3",
    )


def _vocab_size(raw: RawConfig, file: GgufFile) -> int:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return raw.integer("vocab_size", tokens.length if isinstance(tokens, StringArray) else None)


def _read_rope(raw: RawConfig, file: GgufFile, max_positions: int) -> RopeConfig:
    theta = raw.number("rope.freq_base", 10_000.0)
    scaling = raw.choice("rope.scaling.type", ("none", "linear", "yarn"), "none")
    factor = raw.number("rope.scaling.factor", 1.0) or 1.0
    original = raw.integer("rope.scaling.original_context_length", max_positions)
    attention = raw.number("rope.scaling.attn_factor", 1.0)
    if ROPE_FACTORS in file.tensors:
        if scaling != "none":
            raise raw.error("rope.scaling.type", scaling, f"none where {ROPE_FACTORS} is present")
        return RopeConfig("factors", theta, frequency_factors=_frequency_factors(file))
    if scaling == "yarn":
        base = RopeConfig("yarn", theta, factor, original)
        return RopeConfig(
            "yarn", theta, factor, original, attention_factor=base.cos_sin_factor * attention
        )
    if attention != 1.0:
        raise raw.error("rope.scaling.attn_factor", attention, "1.0 without yarn")
    return RopeConfig("linear", theta, factor) if scaling == "linear" else RopeConfig(theta=theta)


def _frequency_factors(file: GgufFile) -> tuple[float, ...]:
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.kind.name != "F32":
        raise CheckpointError(f"{file.path}: {ROPE_FACTORS} is {tensor.kind.name}, not F32")
    count = tensor.num_bytes // 4
    factors = np.frombuffer(file.data, dtype="<f4", count=count, offset=tensor.offset)
    return tuple(float(factor) for factor in factors)
