"""config.json: what is understood, and that everything else is refused by key and value."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvbraid.errors import CheckpointError
from kvbraid.model.config import RopeConfig
from kvbraid.model.loader import load_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
V2 = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def write(folder: Path, values: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_old_and_new_rope_settings_give_the_same_model(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    older = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = {**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    expected = RopeConfig("llama3", 5e5, 8.0, 128, low_freq_factor=1.0, high_freq_factor=4.0)
    for values in (old, older, new):
        assert load_config(write(tmp_path, values)).rope == expected


def test_published_kimi_k2_settings_are_understood(tmp_path: Path) -> None:
    """The numerics of Kimi K2's config.json, fp8 quantisation aside."""
    config = load_config(
        write(
            tmp_path,
            {
                **DEEPSEEK,
                "model_type": "kimi_k2",
                "n_group": 1,
                "topk_group": 1,
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "norm_topk_prob": True,
                "routed_scaling_factor": 2.827,
                "moe_layer_freq": 1,
                "num_nextn_predict_layers": 0,
                "aux_loss_alpha": 0.001,
                "seq_aux": True,
                "ep_size": 1,
                "pretraining_tp": 1,
                "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
                "rope_theta": 50000.0,
                "rope_scaling": {
                    "beta_fast": 1.0,
                    "beta_slow": 1.0,
                    "factor": 32.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 4096,
                    "type": "yarn",
                },
            },
        )
    )
    assert config.family == "deepseek_v3"
    assert config.moe is not None
    assert config.moe.scaling_factor == 2.827
    assert config.rope.cos_sin_factor == 1.0
    # 0.1 ln 32 + 1 = 1.3466, squared, over sqrt(12).
    assert config.softmax_scale == pytest.approx(1.8132 / 12**0.5, rel=1e-3)


def test_layer_frequency_decides_which_layers_have_experts(tmp_path: Path) -> None:
    moe = load_config(write(tmp_path, {**DEEPSEEK, "moe_layer_freq": 2})).moe
    assert moe is not None
    assert [moe.is_moe_layer(i) for i in range(4)] == [False, False, True, False]


def test_null_and_false_unknown_keys_are_accepted(tmp_path: Path) -> None:
    values = {**LLAMA, "new_scheme": None, "use_new_scheme": False}
    assert load_config(write(tmp_path, values)) == load_config(write(tmp_path, LLAMA))


REFUSALS = [
    (LLAMA, {"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM'"),
    (LLAMA, {"architectures": None, "model_type": "mamba"}, "model_type = 'mamba'"),
    (LLAMA, {"model_type": "qwen2"}, "model_type = 'qwen2'"),
    (LLAMA, {"logit_scale": 0.0625}, "logit_scale = 0.0625"),
    (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    (LLAMA, {"use_alibi": True}, "use_alibi = True"),
    (LLAMA, {"sliding_window": 4096}, "sliding_window = 4096"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    (LLAMA, {"rope_interleaved": True}, "rope_interleaved = True"),
    (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    (LLAMA, {"hidden_size": "64"}, "hidden_size = '64'"),
    (LLAMA, {"vocab_size": 0}, "vocab_size = 0"),
    (LLAMA, {"num_hidden_layers": None}, "num_hidden_layers = None"),
    (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads = 3"),
    (LLAMA, {"rms_norm_eps": -1.0}, "rms_norm_eps = -1.0"),
    (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
    (LLAMA, {"head_dim": 7}, "head_dim = 7"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type = 'dynamic'"),
    (LLAMA, {"rope_parameters": {"rope_type": "longrope"}}, "rope_type = 'longrope'"),
    (LLAMA, {"rope_parameters": {"rope_type": "mrope"}}, "rope_type = 'mrope'"),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, "factor = None"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor = 0.5"),
    (
        LLAMA,
        {"rope_scaling": {"type": "linear", "factor": 2.0, "long_factor": [1.0]}},
        "long_factor = [1.0]",
    ),
    (
        LLAMA,
        {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}},
        "type = 'yarn'",
    ),
    (
        LLAMA,
        {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0},
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
        "rope_scaling",
    ),
    (LLAMA, {"rope_scaling": "linear"}, "rope_scaling = 'linear'"),
    ({**LLAMA, **QWEN3}, {"use_sliding_window": True}, "use_sliding_window = True"),
    ({**LLAMA, **QWEN3}, {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    (DEEPSEEK, {"topk_method": "greedy"}, "topk_method = 'greedy'"),
    (DEEPSEEK, {"n_group": 3}, "n_group = 3"),
    (DEEPSEEK, {"n_group": 8}, "n_group = 8"),
    (DEEPSEEK, {"topk_group": 5}, "topk_group = 5"),
    (DEEPSEEK, {"num_experts_per_tok": 5}, "num_experts_per_tok = 5"),
    (DEEPSEEK, {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
    (DEEPSEEK, {"head_dim": 64}, "head_dim = 64"),
    (DEEPSEEK, {"qk_rope_head_dim": 3}, "qk_rope_head_dim = 3"),
    (DEEPSEEK, {"index_topk": 2048}, "index_topk = 2048"),
    ({**DEEPSEEK, **V2}, {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
    ({**DEEPSEEK, **V2}, {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
    ({**DEEPSEEK, **V2}, {"norm_topk_prob": True}, "norm_topk_prob = True"),
    ({**DEEPSEEK, **V2}, {"rope_interleave": False}, "rope_interleave = False"),
]


@pytest.mark.parametrize(("base", "change", "named"), REFUSALS, ids=[r[2] for r in REFUSALS])
def test_a_setting_that_changes_the_numbers_is_refused_by_key_and_value(
    base: dict, change: dict, named: str, tmp_path: Path
) -> None:
    write(tmp_path, base)
    load_config(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        load_config(write(tmp_path, {**base, **change}))
    assert named in str(refusal.value)
    assert "config.json" in str(refusal.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"llama"'])
def test_a_damaged_config_is_refused_by_file_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(tmp_path)


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such folder or file"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json .*found: none"):
        load_config(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"weights\.bin: a model is a folder or a \.gguf"):
        load_config(tmp_path / "weights.bin")


def test_reading_a_config_or_pulling_a_model_needs_no_torch() -> None:
    program = (
        "import sys, kvbraid.model.hf_config, kvbraid.model.gguf_config, kvbraid.model.pull;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
