"""Experts: layers that alternate, tokens that skip a rank's experts, one token or many."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP

SETTINGS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 64,
}
TOKENS = torch.arange(7, 27)


@pytest.fixture
def alternating(tmp_path: Path, lab: SimpleNamespace) -> tuple[Path, torch.Tensor]:
    """A model of four layers of which only layer 2 has experts, and its logits."""
    config = transformers.DeepseekV3Config(**SETTINGS, moe_layer_freq=2)
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    for layer in (1, 3):
        model.model.layers[layer].mlp = DeepseekV3MLP(config)
    lab.randomize(model, 4)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        return tmp_path, model(TOKENS[None], use_cache=False).logits[0]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_moe_layer_freq_alternates_dense_and_expert_layers(
    alternating: tuple[Path, torch.Tensor], tp_size: int, lab: SimpleNamespace
) -> None:
    path, expected = alternating
    _, logits = lab.run_topology(path, [TOKENS], lab.Topology(tp_size))
    assert (logits - expected).abs().max() <= 2e-4


@pytest.mark.parametrize("tp_size", [1, 4])
def test_one_token_at_a_time_routes_as_many_at_once(
    alternating: tuple[Path, torch.Tensor], tp_size: int, lab: SimpleNamespace
) -> None:
    path, expected = alternating
    _, logits = lab.run_topology(path, list(TOKENS.split(1)), lab.Topology(tp_size))
    assert (logits - expected).abs().max() <= 2e-4
