"""Canonical names and shapes of a drafter's tensors, and the names that are not read."""

from __future__ import annotations

import re

from kvbraid.speculative.drafter_config import AnyDrafterConfig, DSparkConfig, Eagle3Config

Shapes = dict[str, tuple[int, ...]]

_RENAMED_PREFIXES = {
    "midlayer.": "layers.0.",
    "context_proj.": "fc.",
    "context_norm.": "hidden_norm.",
    "final_norm.": "norm.",
}


def canonical_name(name: str) -> str:
    """The one name of a tensor whose name differs between dialects."""
    for prefix, canonical in _RENAMED_PREFIXES.items():
        if name.startswith(prefix):
            return canonical + name.removeprefix(prefix)
    return name


def known_extras(config: AnyDrafterConfig) -> dict[str, re.Pattern[str]]:
    """Why a tensor that the drafter does not use may be in its file -> names."""
    extras = {
        "membership in the draft vocabulary, checked against d2t": re.compile(r"t2d"),
        "rotary frequencies, computed from the config": re.compile(
            r"(layers\.\d+\.self_attn\.)?rotary_emb\.(original_)?inv_freq"
        ),
    }
    if config.dialect == "speculators":
        extras["the target's weights, kept from training"] = re.compile(r"verifier_.+")
    return extras


def expected_tensors(config: AnyDrafterConfig) -> Shapes:
    """Every tensor of the drafter with its shape; d2t where the draft vocabulary is smaller."""
    width = config.hidden_size
    shapes = {
        "fc.weight": (width, len(config.tap_layers) * config.target_hidden_size),
        "norm.weight": (width,),
    }
    if isinstance(config, Eagle3Config):
        shapes |= _eagle3_shapes(config)
    else:
        shapes |= _dspark_shapes(config)
    if config.has_own_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, width)
    if config.has_own_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, width)
    if config.draft_vocab_size < config.vocab_size:
        shapes["d2t"] = (config.draft_vocab_size,)
    return shapes


def _eagle3_shapes(config: Eagle3Config) -> Shapes:
    shapes = _layer_shapes(config, 0, 2 * config.hidden_size)
    shapes["layers.0.hidden_norm.weight"] = (config.hidden_size,)
    num_taps, tap_width = len(config.tap_layers), config.target_hidden_size
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (num_taps * tap_width,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (tap_width,) for i in range(num_taps)}
    return shapes


def _dspark_shapes(config: DSparkConfig) -> Shapes:
    width, rank = config.hidden_size, config.markov_rank
    shapes: Shapes = {"hidden_norm.weight": (width,)}
    for layer in range(config.num_layers):
        shapes |= _layer_shapes(config, layer, width)
    shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
    shapes["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
    if config.markov_head == "gated":
        shapes |= _linear("markov_head.gate_proj", rank, width + rank)
    if config.markov_head == "rnn":
        shapes |= _linear("markov_head.joint_proj", 3 * rank, width + 2 * rank)
    if config.has_confidence_head:
        read_width = width + (rank if config.confidence_with_markov else 0)
        shapes |= _linear("confidence_head.proj", 1, read_width)
    return shapes


def _layer_shapes(config: AnyDrafterConfig, layer: int, input_width: int) -> Shapes:
    prefix, width, hidden = f"layers.{layer}", config.hidden_size, config.intermediate_size
    shapes: Shapes = {
        f"{prefix}.input_layernorm.weight": (width,),
        f"{prefix}.post_attention_layernorm.weight": (width,),
    }
    attention = _gqa_shapes if config.mla is None else _mla_shapes
    shapes |= attention(config, f"{prefix}.self_attn", input_width)
    for name, rows, columns in (
        ("gate", hidden, width),
        ("up", hidden, width),
        ("down", width, hidden),
    ):
        shapes |= _linear(f"{prefix}.mlp.{name}_proj", rows, columns, config.mlp_bias)
    return shapes


def _gqa_shapes(config: AnyDrafterConfig, prefix: str, input_width: int) -> Shapes:
    dim = config.head_dim
    shapes: Shapes = {}
    for name, num_heads in (
        ("q", config.num_q_heads),
        ("k", config.num_kv_heads),
        ("v", config.num_kv_heads),
    ):
        full = f"{prefix}.{name}_proj"
        shapes |= _linear(full, num_heads * dim, input_width, config.qkv_bias)
    shapes |= _linear(
        f"{prefix}.o_proj", config.hidden_size, config.num_q_heads * dim, config.output_bias
    )
    if config.qk_norm:
        shapes |= {f"{prefix}.q_norm.weight": (dim,), f"{prefix}.k_norm.weight": (dim,)}
    return shapes


def _mla_shapes(config: AnyDrafterConfig, prefix: str, input_width: int) -> Shapes:
    mla = config.mla
    assert mla is not None
    assert mla.q_lora_rank is not None
    heads = config.num_q_heads
    kv_width = mla.qk_nope_head_dim + mla.v_head_dim
    return {
        f"{prefix}.q_a_proj.weight": (mla.q_lora_rank, input_width),
        f"{prefix}.q_a_layernorm.weight": (mla.q_lora_rank,),
        f"{prefix}.q_b_proj.weight": (heads * mla.qk_head_dim, mla.q_lora_rank),
        f"{prefix}.kv_a_proj_with_mqa.weight": (mla.latent_width, input_width),
        f"{prefix}.kv_a_layernorm.weight": (mla.kv_lora_rank,),
        f"{prefix}.kv_b_proj.weight": (heads * kv_width, mla.kv_lora_rank),
        f"{prefix}.o_proj.weight": (config.hidden_size, heads * mla.v_head_dim),
    }


def _linear(name: str, rows: int, columns: int, has_bias: bool = True) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (rows, columns)}
    if has_bias:
        shapes[f"{name}.bias"] = (rows,)
    return shapes
