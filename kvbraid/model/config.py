"""What a checkpoint says about its model, independent of the file format. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

LLAMA_FAMILIES = frozenset({"llama", "qwen2", "qwen3"})
DEEPSEEK_FAMILIES = frozenset({"deepseek_v2", "deepseek_v3"})


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature: 0.1 * mscale * ln(factor) + 1, or 1 when nothing is scaled."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: how angles follow from positions.

    rope_type is one of default, linear, llama3, yarn and factors (GGUF: each frequency divided by
    its entry of `frequency_factors`).
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    frequency_factors: tuple[float, ...] = ()

    @property
    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied with."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(
                self.factor, self.mscale_all_dim
            )
        return yarn_mscale(self.factor, 1.0)


@dataclass(frozen=True, slots=True)
class MLAConfig:
    """Multi-head latent attention; q_lora_rank is None where q is projected directly."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head: the nope part, then the rope part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Numbers a token keeps in a layer's KV cache: the latent, then the rope key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def attention_scale(head_dim: int, mla: MLAConfig | None, rope: RopeConfig) -> float:
    """Factor on q.k; with YaRN's mscale_all_dim it carries the temperature, squared."""
    if mla is None:
        return 1 / math.sqrt(head_dim)
    scale = 1 / math.sqrt(mla.qk_head_dim)
    if rope.rope_type == "yarn" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Mixture of experts.

    topk_method: "greedy" and "group_limited_greedy" score by softmax (V2); "noaux_tc" scores by
    sigmoid and chooses with a correction bias (V3).
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    num_shared_experts: int
    first_dense_layers: int
    layer_frequency: int
    topk_method: str
    num_groups: int
    num_groups_per_token: int
    normalize_weights: bool
    scaling_factor: float

    def is_moe_layer(self, layer: int) -> bool:
        """Whether `layer` routes to experts; the others have a dense MLP."""
        return layer >= self.first_dense_layers and layer % self.layer_frequency == 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and numerics of one model.

    family is llama, qwen2, qwen3, deepseek_v2 or deepseek_v3. num_mtp_layers counts the
    multi-token-prediction layers whose tensors are skipped.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeConfig
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    num_mtp_layers: int = 0

    @property
    def kv_kind(self) -> str:
        """Which cache the engine keeps: "gqa" or "mla"."""
        return "mla" if self.mla is not None else "gqa"

    @property
    def softmax_scale(self) -> float:
        """Factor on q.k."""
        return attention_scale(self.head_dim, self.mla, self.rope)
