"""The shape and numerics of a drafter's layers, read from a Llama-, Qwen3- or DeepSeek-style
config section."""

from __future__ import annotations

from typing import TypedDict

from kvbraid.model.config import MLAConfig, ModelConfig, RopeConfig
from kvbraid.model.hf_rope_config import read_rope
from kvbraid.model.raw_config import RawConfig

# Experts and routing of the target, copied into the config of a drafter whose MLP is dense.
COPIED_MOE_KEYS = (
    "first_k_dense_replace",
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "num_nextn_predict_layers",
    "routed_scaling_factor",
    "scoring_func",
    "topk_group",
    "topk_method",
)


class LayerFields(TypedDict):
    """The fields of DrafterConfig that describe its layers."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    mla: MLAConfig | None
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool


def read_gqa_layers(
    raw: RawConfig, target: ModelConfig, *, qk_norm: bool, has_output_bias: bool
) -> LayerFields:
    """Grouped-query attention. has_output_bias: the file has a bias of o_proj; with
    attention_bias some tools give it one and some do not."""
    _refuse_variants(raw)
    hidden_size = raw.integer("hidden_size")
    num_q_heads = raw.integer("num_attention_heads")
    num_kv_heads = raw.integer("num_key_value_heads", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise raw.error("num_key_value_heads", num_kv_heads, f"a divisor of {num_q_heads}")
    # The defaults of transformers' Qwen3 and Llama configs.
    head_dim = raw.integer("head_dim", 128 if qk_norm else max(1, hidden_size // num_q_heads))
    if head_dim % 2:
        raise raw.error("head_dim", head_dim, "an even number")
    has_bias = raw.flag("attention_bias")
    return LayerFields(
        hidden_size=hidden_size,
        num_layers=raw.integer("num_hidden_layers"),
        intermediate_size=raw.integer("intermediate_size"),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        rope=_read_rope(raw, target),
        mla=None,
        qk_norm=qk_norm,
        qkv_bias=has_bias,
        output_bias=has_bias and has_output_bias,
        mlp_bias=raw.flag("mlp_bias"),
    )


def read_mla_layers(raw: RawConfig, target: ModelConfig) -> LayerFields:
    """DeepSeek's latent attention with a dense MLP; q_lora_rank is mandatory."""
    _refuse_variants(raw)
    raw.fixed("attention_bias", False)
    raw.fixed("mlp_bias", False)
    for key in COPIED_MOE_KEYS:
        raw.value(key)
    num_heads = raw.integer("num_attention_heads")
    raw.fixed("num_key_value_heads", num_heads)
    mla = _read_mla(raw)
    return LayerFields(
        hidden_size=raw.integer("hidden_size"),
        num_layers=raw.integer("num_hidden_layers"),
        intermediate_size=raw.integer("intermediate_size"),
        num_q_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=mla.qk_head_dim,
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        rope=_read_rope(raw, target),
        mla=mla,
        qk_norm=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
    )


def _read_mla(raw: RawConfig) -> MLAConfig:
    rope_dim, nope_dim = raw.integer("qk_rope_head_dim"), raw.integer("qk_nope_head_dim")
    if rope_dim % 2:
        raise raw.error("qk_rope_head_dim", rope_dim, "an even number")
    raw.fixed("qk_head_dim", nope_dim + rope_dim)
    # Tools write the rope width, the whole width or the value width here; none is used.
    raw.value("head_dim")
    return MLAConfig(
        q_lora_rank=raw.integer("q_lora_rank"),
        kv_lora_rank=raw.integer("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=raw.integer("v_head_dim"),
        rope_interleave=raw.flag("rope_interleave", True),
    )


def _read_rope(raw: RawConfig, target: ModelConfig) -> RopeConfig:
    """max_position_embeddings of a drafter is what it was trained on (2048 in most files) and
    bounds nothing: the target's holds."""
    raw.value("max_position_embeddings")
    raw.fixed("partial_rotary_factor", 1.0)
    return read_rope(raw, target.max_position_embeddings)


def _refuse_variants(raw: RawConfig) -> None:
    raw.fixed("hidden_act", "silu")
    raw.fixed("rope_interleaved", False)
    if raw.value("quantization_config") is not None:
        raise raw.error("quantization_config", raw.value("quantization_config"), "null")
    raw.fixed("use_sliding_window", False)
    layer_types = raw.value("layer_types")
    is_full = isinstance(layer_types, list) and set(layer_types) == {"full_attention"}
    if layer_types is not None and not is_full:
        raise raw.error("layer_types", layer_types, "full_attention only")
    window = raw.value("sliding_window")
    # Qwen-style configs keep a width that use_sliding_window or layer_types switch off.
    is_off = raw.has("use_sliding_window") or is_full
    if window is not None and not is_off:
        raise raw.error("sliding_window", window, "null")
