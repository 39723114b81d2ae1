"""Hugging Face config.json -> ModelConfig. Torch-free; an unknown key is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from kvbraid.errors import CheckpointError
from kvbraid.model.config import ModelConfig
from kvbraid.model.hf_deepseek_config import read_deepseek
from kvbraid.model.hf_rope_config import read_rope
from kvbraid.model.raw_config import RawConfig

# Keys that never change what a forward pass computes at inference.
INERT_KEYS = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "auto_map",
        "tokenizer_class",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "cls_token_id",
        "mask_token_id",
        "decoder_start_token_id",
        "initializer_range",
        "attention_dropout",
        "hidden_dropout",
        "classifier_dropout",
        "pretraining_tp",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "return_dict",
        "return_dict_in_generate",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "torchscript",
        "chunk_size_feed_forward",
        "is_llama_config",
        "transformers.js_config",
        "ep_size",
        "aux_loss_alpha",
        "seq_aux",
        "router_aux_loss_coef",
        "task_specific_params",
        "prefix",
        "max_length",
        "min_length",
        "do_sample",
        "num_beams",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "early_stopping",
        "num_return_sequences",
        "encoder_no_repeat_ngram_size",
        "diversity_penalty",
        "num_beam_groups",
        "remove_invalid_values",
        "_attn_implementation_autoset",
        "attn_implementation",
        "unsloth_version",
        "unsloth_fixed",
    }
)

# architectures[0] -> the model_type values that go with it.
ARCHITECTURES = {
    "LlamaForCausalLM": ("llama",),
    "Qwen2ForCausalLM": ("qwen2",),
    "Qwen3ForCausalLM": ("qwen3",),
    "DeepseekV2ForCausalLM": ("deepseek_v2",),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "kimi_k2"),
}


def read_hf_config(folder: Path) -> ModelConfig:
    """The model of `folder`/config.json.

    Raises CheckpointError naming the file and the key where the architecture, a rope type or any
    key that could change the numbers is not known.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not a readable config.json: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(values).__name__}")
    raw = RawConfig(values, str(path))
    config = _READERS[_family(raw)](raw)
    raw.finish(INERT_KEYS)
    return config


def _family(raw: RawConfig) -> str:
    model_type = raw.value("model_type")
    architectures = raw.value("architectures")
    if architectures is None:
        families = {types[0]: types for types in ARCHITECTURES.values()}
        for family, types in families.items():
            if model_type in types:
                return family
        raise raw.error("model_type", model_type, ", ".join(sorted(families)))
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise raw.error("architectures", architectures, "a list of one architecture")
    if architectures[0] not in ARCHITECTURES:
        raise raw.error("architectures", architectures[0], ", ".join(ARCHITECTURES))
    types = ARCHITECTURES[architectures[0]]
    if model_type is not None and model_type not in types:
        raise raw.error("model_type", model_type, f"{', '.join(types)} with {architectures[0]}")
    return types[0]


def _refuse_variants(raw: RawConfig) -> None:
    raw.fixed("hidden_act", "silu")
    raw.fixed("partial_rotary_factor", 1.0)
    if raw.value("quantization_config") is not None:
        raise raw.error(
            "quantization_config",
            raw.value("quantization_config"),
            "unquantised safetensors, or a GGUF file",
        )


def _refuse_sliding_window(raw: RawConfig) -> None:
    raw.fixed("use_sliding_window", False)
    raw.value("sliding_window")
    raw.value("max_window_layers")
    layer_types = raw.value("layer_types")
    if layer_types is not None and set(layer_types) != {"full_attention"}:  # type: ignore[call-overload]
        raise raw.error("layer_types", layer_types, "full_attention only")


def _read_llama_like(raw: RawConfig, family: str) -> ModelConfig:
    _refuse_variants(raw)
    hidden_size = raw.integer("hidden_size")
    num_q_heads = raw.integer("num_attention_heads")
    default_head_dim = 128 if family == "qwen3" else max(1, hidden_size // num_q_heads)
    head_dim = raw.integer("head_dim", default_head_dim)
    num_kv_heads = raw.integer("num_key_value_heads", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise raw.error("num_key_value_heads", num_kv_heads, f"a divisor of {num_q_heads}")
    if head_dim % 2:
        raise raw.error("head_dim", head_dim, "an even number")
    max_positions = raw.integer("max_position_embeddings")
    attention_bias = raw.flag("attention_bias") if family != "qwen2" else False
    return ModelConfig(
        family=family,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("intermediate_size"),
        num_layers=raw.integer("num_hidden_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        tie_word_embeddings=raw.flag("tie_word_embeddings"),
        rope=read_rope(raw, max_positions),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=raw.flag("mlp_bias") if family == "llama" else False,
        qk_norm=family == "qwen3",
    )


def _read_llama(raw: RawConfig) -> ModelConfig:
    raw.fixed("rope_interleaved", False)
    return _read_llama_like(raw, "llama")


def _read_qwen(raw: RawConfig, family: str) -> ModelConfig:
    _refuse_sliding_window(raw)
    return _read_llama_like(raw, family)


def _read_deepseek(raw: RawConfig, family: str) -> ModelConfig:
    _refuse_variants(raw)
    return read_deepseek(raw, family)


_READERS: dict[str, Callable[[RawConfig], ModelConfig]] = {
    "llama": _read_llama,
    "qwen2": lambda raw: _read_qwen(raw, "qwen2"),
    "qwen3": lambda raw: _read_qwen(raw, "qwen3"),
    "deepseek_v2": lambda raw: _read_deepseek(raw, "deepseek_v2"),
    "deepseek_v3": lambda raw: _read_deepseek(raw, "deepseek_v3"),
}
