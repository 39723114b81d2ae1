"""The DeepSeek V2, V3 and Kimi K2 part of config.json: latent attention and experts."""

from __future__ import annotations

from kvbraid.model.config import MLAConfig, ModelConfig, MoEConfig
from kvbraid.model.hf_rope_config import read_rope
from kvbraid.model.raw_config import RawConfig


def read_deepseek(raw: RawConfig, family: str) -> ModelConfig:
    """Raises CheckpointError on a routing rule or shape that is not known."""
    num_heads = raw.integer("num_attention_heads")
    raw.fixed("num_key_value_heads", num_heads)
    mla = _read_mla(raw, family)
    num_layers = raw.integer("num_hidden_layers")
    max_positions = raw.integer("max_position_embeddings")
    attention_bias = raw.flag("attention_bias")
    return ModelConfig(
        family=family,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=raw.integer("hidden_size"),
        intermediate_size=raw.integer("intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=mla.qk_head_dim,
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        tie_word_embeddings=raw.flag("tie_word_embeddings"),
        rope=read_rope(raw, max_positions),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=raw.flag("mlp_bias") if family == "deepseek_v2" else False,
        mla=mla,
        moe=_read_moe(raw, family),
        num_mtp_layers=_num_mtp_layers(raw),
    )


def _num_mtp_layers(raw: RawConfig) -> int:
    newer = raw.integer("num_mtp_layers", 0, minimum=0)
    return raw.integer("num_nextn_predict_layers", newer, minimum=0)


def _read_mla(raw: RawConfig, family: str) -> MLAConfig:
    rope_dim = raw.integer("qk_rope_head_dim")
    nope_dim = raw.integer("qk_nope_head_dim")
    if rope_dim % 2:
        raise raw.error("qk_rope_head_dim", rope_dim, "an even number")
    raw.fixed("head_dim", rope_dim)
    raw.fixed("qk_head_dim", nope_dim + rope_dim)
    interleave = raw.flag("rope_interleave", True)
    if family == "deepseek_v2" and not interleave:
        raise raw.error("rope_interleave", interleave, "true for DeepSeek V2")
    return MLAConfig(
        q_lora_rank=raw.optional_integer("q_lora_rank"),
        kv_lora_rank=raw.integer("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=raw.integer("v_head_dim"),
        rope_interleave=interleave,
    )


def _read_moe(raw: RawConfig, family: str) -> MoEConfig | None:
    is_v3 = family == "deepseek_v3"
    method = _read_routing(raw, is_v3)
    num_experts = raw.optional_integer("n_routed_experts")
    aliases = [key for key in ("num_local_experts", "num_experts") if raw.has(key)]
    for key in aliases:
        raw.fixed(key, num_experts)
    grouped = method != "greedy"
    moe_fields = {
        "num_groups": raw.optional_integer("n_group"),
        "num_groups_per_token": raw.optional_integer("topk_group"),
    }
    layout = {
        "num_shared_experts": raw.integer("n_shared_experts", 0, minimum=0),
        "first_dense_layers": raw.integer("first_k_dense_replace", 0, minimum=0),
        "layer_frequency": raw.integer("moe_layer_freq", 1),
        "num_experts_per_token": raw.integer("num_experts_per_tok", 1),
        "intermediate_size": raw.integer("moe_intermediate_size", 1),
    }
    scaling_factor = raw.number("routed_scaling_factor", 1.0)
    normalize = _read_normalize(raw, is_v3)
    if num_experts is None:
        return None
    moe = MoEConfig(
        num_experts=num_experts,
        topk_method=method,
        num_groups=(moe_fields["num_groups"] or 1) if grouped else 1,
        num_groups_per_token=(moe_fields["num_groups_per_token"] or 1) if grouped else 1,
        normalize_weights=normalize,
        scaling_factor=scaling_factor,
        **layout,
    )
    _check_groups(raw, moe)
    return moe


def _read_routing(raw: RawConfig, is_v3: bool) -> str:
    raw.fixed("scoring_func", "sigmoid" if is_v3 else "softmax")
    if is_v3:
        return raw.choice("topk_method", ("noaux_tc",), "noaux_tc")
    return raw.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")


def _read_normalize(raw: RawConfig, is_v3: bool) -> bool:
    """V2 implementations disagree on what normalised weights are scaled with, so V2 refuses it."""
    normalize = raw.flag("norm_topk_prob", is_v3)
    if normalize and not is_v3:
        raise raw.error("norm_topk_prob", normalize, "false for DeepSeek V2")
    return normalize


def _check_groups(raw: RawConfig, moe: MoEConfig) -> None:
    if moe.num_experts % moe.num_groups:
        raise raw.error("n_group", moe.num_groups, f"a divisor of {moe.num_experts} experts")
    if moe.num_groups_per_token > moe.num_groups:
        raise raw.error("topk_group", moe.num_groups_per_token, f"at most {moe.num_groups}")
    experts_per_group = moe.num_experts // moe.num_groups
    if moe.topk_method == "noaux_tc" and experts_per_group < 2:
        raise raw.error("n_group", moe.num_groups, "groups of at least 2 experts")
    reachable = experts_per_group * moe.num_groups_per_token
    if moe.num_experts_per_token > reachable:
        raise raw.error("num_experts_per_tok", moe.num_experts_per_token, f"at most {reachable}")
