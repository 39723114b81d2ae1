"""Every family and variant, saved by transformers and loaded unchanged, against its forward."""

from __future__ import annotations

import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor

LLAMA = {
    "vocab_size": 67,
    "hidden_size": 72,
    "intermediate_size": 70,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
DEEPSEEK = {
    "vocab_size": 67,
    "hidden_size": 60,
    "intermediate_size": 54,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
}
V3_GROUPS = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PLAIN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

VARIANTS: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", LLAMA),
    "llama_tied_llama3": (
        "Llama",
        {**LLAMA, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "llama_linear_biases": (
        "Llama",
        {
            **LLAMA,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
        },
    ),
    "llama_three_heads": ("Llama", {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {**LLAMA, "num_attention_heads": 6, "head_dim": None}),
    "qwen2_yarn_tied": (
        "Qwen2",
        {
            **LLAMA,
            "num_attention_heads": 6,
            "head_dim": None,
            "tie_word_embeddings": True,
            "rope_parameters": {**PLAIN_YARN, "rope_theta": 1000.0},
        },
    ),
    "qwen3": ("Qwen3", {**LLAMA, "num_attention_heads": 12, "head_dim": 16}),
    "deepseek_v2_greedy": (
        "DeepseekV2",
        {**DEEPSEEK, "topk_method": "greedy", "routed_scaling_factor": 1.7},
    ),
    "deepseek_v2_lite": (
        "DeepseekV2",
        {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy", "rope_parameters": YARN},
    ),
    "deepseek_v2_groups": (
        "DeepseekV2",
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": ("DeepseekV3", {**DEEPSEEK, **V3_GROUPS, "rope_parameters": YARN}),
    "deepseek_v3_half_split_rope": (
        "DeepseekV3",
        {**DEEPSEEK, **V3_GROUPS, "rope_interleave": False, "attention_bias": True},
    ),
    "kimi_k2_like": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            **V3_GROUPS,
            "n_group": 1,
            "topk_group": 1,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "rope_parameters": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0},
        },
    ),
}
TOPOLOGIES = [
    (1, 1, "gather"),
    (2, 1, "gather"),
    (2, 2, "replicate"),
    (3, 3, "gather"),
    (4, 2, "replicate"),
    (4, 1, "gather"),
]
TOKENS = 40


class Oracle:
    """A saved random model and what transformers computes from it in fp32."""

    def __init__(self, name: str, folder: Path, randomize) -> None:
        architecture, settings = VARIANTS[name]
        settings = {
            key: value for key, value in settings.items() if value is not None or "lora" in key
        }
        config = getattr(transformers, f"{architecture}Config")(**settings)
        model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
        randomize(model, zlib.crc32(name.encode()))
        model.save_pretrained(folder)
        self.folder = folder
        self.token_ids = torch.randint(
            0, config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(5)
        )
        self.hidden, self.logits = self._forward(model, "eager")
        other_hidden, other_logits = self._forward(model, "sdpa")
        noise = max(_distance(self.hidden, other_hidden), _distance(self.logits, other_logits))
        self.bound = max(2e-4, 4 * noise)

    def _forward(self, model, implementation: str) -> tuple[Tensor, Tensor]:
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            out = model(self.token_ids[None], output_hidden_states=True, use_cache=False)
        return out.hidden_states[-1][0], out.logits[0]


def _distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    return {}


@pytest.fixture
def oracle(request, oracles, lab: SimpleNamespace, tmp_path_factory) -> Oracle:
    name = request.param
    if name not in oracles:
        oracles[name] = Oracle(name, tmp_path_factory.mktemp(name), lab.randomize)
    return oracles[name]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"tp{t[0]}-dcp{t[1]}-{t[2]}")
@pytest.mark.parametrize("oracle", VARIANTS, indirect=True)
def test_hidden_states_and_logits_equal_transformers(
    oracle: Oracle, topology: tuple[int, int, str], lab: SimpleNamespace
) -> None:
    hidden, logits = lab.run_topology(oracle.folder, [oracle.token_ids], lab.Topology(*topology))
    assert oracle.logits.std() > 0.3, "the oracle's logits would not show a difference"
    assert _distance(hidden, oracle.hidden) <= oracle.bound
    assert _distance(logits, oracle.logits) <= oracle.bound


@pytest.mark.parametrize(
    "oracle", [n for n in VARIANTS if "llama" not in n and "qwen" not in n], indirect=True
)
def test_expanded_latent_attention_equals_transformers(
    oracle: Oracle, lab: SimpleNamespace
) -> None:
    hidden, logits = lab.run_topology(
        oracle.folder, [oracle.token_ids], lab.Topology(2, 2, "replicate"), is_absorbed=False
    )
    assert _distance(hidden, oracle.hidden) <= oracle.bound
    assert _distance(logits, oracle.logits) <= oracle.bound


@pytest.mark.parametrize(
    "oracle", ["llama", "qwen3", "deepseek_v3", "deepseek_v2_lite"], indirect=True
)
def test_chunks_then_single_tokens_equal_one_forward(oracle: Oracle, lab: SimpleNamespace) -> None:
    chunks = [oracle.token_ids[:17], oracle.token_ids[17:33], *oracle.token_ids[33:].split(1)]
    hidden, _ = lab.run_topology(oracle.folder, chunks, lab.Topology(2, 1))
    assert _distance(hidden, oracle.hidden) <= oracle.bound


@pytest.mark.parametrize("oracle", ["llama", "deepseek_v3"], indirect=True)
def test_bf16_follows_the_fp32_model(oracle: Oracle, lab: SimpleNamespace) -> None:
    _, logits = lab.run_topology(
        oracle.folder, [oracle.token_ids], lab.Topology(2, 1), dtype=torch.bfloat16
    )
    similarity = torch.cosine_similarity(logits, oracle.logits, dim=-1)
    assert similarity.median() > 0.995
