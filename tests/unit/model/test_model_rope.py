"""Rotary frequencies and factors against transformers, and the rotation against complex numbers."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvbraid.errors import CheckpointError
from kvbraid.model.config import RopeConfig
from kvbraid.model.rope import Rotary, inverse_frequencies, rotate

CASES = [
    RopeConfig("linear", 10000.0, 4.0),
    RopeConfig("llama3", 500000.0, 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
    RopeConfig("llama3", 500000.0, 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
    RopeConfig("yarn", 1000000.0, 4.0, 32768),
    RopeConfig("yarn", 10000.0, 40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
    RopeConfig("yarn", 10000.0, 40.0, 4096, mscale=0.707, mscale_all_dim=0.5),
    RopeConfig("yarn", 50000.0, 32.0, 4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0),
    RopeConfig("yarn", 10000.0, 16.0, 2048, attention_factor=1.3, truncate=False),
]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rope", CASES, ids=lambda r: f"{r.rope_type}-{r.factor}-{r.mscale}")
def test_frequencies_and_factor_equal_transformers(rope: RopeConfig, dim: int) -> None:
    parameters = {"rope_type": rope.rope_type, "rope_theta": rope.theta, "factor": rope.factor}
    if rope.rope_type != "linear":
        parameters["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.rope_type == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope.rope_type == "yarn":
        keys = ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim")
        parameters |= {key: getattr(rope, key) for key in keys}
        parameters["attention_factor"] = rope.attention_factor
    config = transformers.LlamaConfig(
        hidden_size=dim, num_attention_heads=1, rope_parameters=parameters
    )
    expected, factor = ROPE_INIT_FUNCTIONS[rope.rope_type](config, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(rope, dim), expected, rtol=1e-6, atol=0)
    assert rope.cos_sin_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("first", [0, 100_000])
def test_rotation_turns_each_pair_by_position_times_frequency(first: int) -> None:
    rope = RopeConfig(theta=10000.0)
    positions = torch.arange(first, first + 5)
    heads = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0))
    rotated = rotate(heads, Rotary(rope, 16, torch.device("cpu")).tables(positions, torch.float32))
    pairs = torch.complex(heads[..., :8].double(), heads[..., 8:].double())
    # The angle itself is fp32, as in every published implementation.
    angles = (positions[:, None].float() * inverse_frequencies(rope, 16)).double()
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((turned.real, turned.imag), -1).float()
    torch.testing.assert_close(rotated, expected, rtol=0, atol=1e-5)


def test_frequency_factors_must_be_one_a_pair() -> None:
    rope = RopeConfig("factors", frequency_factors=(1.0, 2.0))
    torch.testing.assert_close(inverse_frequencies(rope, 4), torch.tensor([1.0, 0.005]))
    with pytest.raises(CheckpointError, match="2 frequency factors for 8 pairs"):
        inverse_frequencies(rope, 16)
