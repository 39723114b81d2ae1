"""DeepSeek V2, V3 and Kimi K2: latent attention, and experts in most layers.

T tokens, Hq query heads projected here, dn/dr nope and rope widths of a head, R latent rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.interface import LatentExpansion
from kvbraid.model.attention_port import LayerAttention
from kvbraid.model.config import MLAConfig, ModelConfig
from kvbraid.model.layers import (
    GatedMLP,
    Projection,
    load_mlp,
    load_norm,
    sum_over_ranks,
)
from kvbraid.model.llama import load_output
from kvbraid.model.moe import MoELayer, load_moe
from kvbraid.model.parallel import ParallelContext
from kvbraid.model.rms_norm import RMSNorm
from kvbraid.model.rope import RopeTables, rotate
from kvbraid.model.weight_reader import WeightReader

# The norms inside the attention use this whatever rms_norm_eps says, as the published model code.
LATENT_NORM_EPS = 1e-6


class DeepseekLayer:
    """Latent attention and MLP (dense or experts) of one layer on one rank."""

    def __init__(
        self,
        reader: WeightReader,
        config: ModelConfig,
        parallel: ParallelContext,
        layer: int,
    ) -> None:
        prefix = f"model.layers.{layer}"
        eps, hidden_size = config.rms_norm_eps, config.hidden_size
        self._group = parallel.tp_group
        self._input_norm = load_norm(reader, f"{prefix}.input_layernorm", hidden_size, eps)
        self._mlp_norm = load_norm(reader, f"{prefix}.post_attention_layernorm", hidden_size, eps)
        self._attention = LatentAttention(reader, config, parallel, layer)
        self._mlp = _load_mlp(reader, config, parallel, layer)

    def forward(self, hidden: Tensor, tables: RopeTables, attention: LayerAttention) -> Tensor:
        """As DecoderLayer.forward."""
        attended = self._attention.forward(self._input_norm.forward(hidden), tables, attention)
        hidden.add_(sum_over_ranks(attended, self._group))
        expanded = self._mlp.forward(self._mlp_norm.forward(hidden))
        return hidden.add_(sum_over_ranks(expanded, self._group))


class LatentAttention:
    """Projections around the engine's latent attention.

    Rope parts stored as interleaved pairs have their rows reordered to the half-split layout at
    load: the products of q and k stay the same and the cache row is [latent, rope key].
    """

    def __init__(
        self,
        reader: WeightReader,
        config: ModelConfig,
        parallel: ParallelContext,
        layer: int,
    ) -> None:
        mla = config.mla
        assert mla is not None
        prefix = f"model.layers.{layer}.self_attn"
        self._layer = layer
        self._mla = mla
        heads = parallel.q_heads
        self._head_shape = (len(heads), mla.qk_head_dim)
        self._down, self._q_norm, self._q_up = _load_q_and_latent(
            reader, prefix, config, mla, heads
        )
        self._kv_norm = load_norm(
            reader, f"{prefix}.kv_a_layernorm", mla.kv_lora_rank, LATENT_NORM_EPS
        )
        self._expansion = load_expansion(reader, prefix, config.num_q_heads, mla, heads)
        self._output = load_output(reader, f"{prefix}.o_proj", config, parallel, mla.v_head_dim)

    def forward(self, x: Tensor, tables: RopeTables, attention: LayerAttention) -> Tensor:
        """Normed x [T, hidden] -> this rank's partial sum [T, hidden]."""
        mla = self._mla
        down = self._down.forward(x)
        q = down[:, : -mla.latent_width]
        if self._q_norm is not None and self._q_up is not None:
            q = self._q_up.forward(self._q_norm.forward(q))
        q = q.reshape(x.shape[0], *self._head_shape)
        key = down[:, -mla.qk_rope_head_dim :]
        latent = self._kv_norm.forward(down[:, -mla.latent_width : -mla.qk_rope_head_dim])
        rotated = rotate(torch.cat((q[..., mla.qk_nope_head_dim :], key[:, None]), 1), tables)
        out = attention.mla(
            self._layer,
            q[..., : mla.qk_nope_head_dim],
            rotated[:, :-1],
            torch.cat((latent, rotated[:, -1]), 1),
            self._expansion,
        )
        return self._output.forward(out.reshape(x.shape[0], out.shape[1] * mla.v_head_dim))


def _load_mlp(
    reader: WeightReader, config: ModelConfig, parallel: ParallelContext, layer: int
) -> GatedMLP | MoELayer:
    prefix = f"model.layers.{layer}.mlp"
    if config.moe is not None and config.moe.is_moe_layer(layer):
        return load_moe(reader, prefix, config, parallel)
    return load_mlp(
        reader,
        prefix,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        part=parallel.shard(config.intermediate_size),
        has_bias=config.mlp_bias,
        adds_bias=parallel.is_first_rank,
    )


def _load_q_and_latent(
    reader: WeightReader, prefix: str, config: ModelConfig, mla: MLAConfig, heads: range
) -> tuple[Projection, RMSNorm | None, Projection | None]:
    """The projection of x to [q or its low-rank form, latent, rope key] and what follows for q."""
    hidden_size, num_heads = config.hidden_size, config.num_q_heads
    latent = load_latent(reader, prefix, hidden_size, mla, has_bias=config.qkv_bias)
    if mla.q_lora_rank is None:
        q = load_query(reader, f"{prefix}.q_proj.weight", hidden_size, num_heads, mla, heads)
        biases = [q.new_zeros(q.shape[0]), *latent[1:]] if config.qkv_bias else []
        return Projection([q, latent[0]], biases), None, None
    rank = mla.q_lora_rank
    q_down = reader.take(f"{prefix}.q_a_proj.weight", (rank, hidden_size))
    biases = []
    if config.qkv_bias:
        biases = [reader.take(f"{prefix}.q_a_proj.bias", (rank,)), *latent[1:]]
    q_up = load_query(reader, f"{prefix}.q_b_proj.weight", rank, num_heads, mla, heads)
    norm = load_norm(reader, f"{prefix}.q_a_layernorm", rank, LATENT_NORM_EPS)
    return Projection([q_down, latent[0]], biases), norm, Projection([q_up])


def load_latent(
    reader: WeightReader, prefix: str, num_inputs: int, mla: MLAConfig, *, has_bias: bool
) -> list[Tensor]:
    """The weight [R + dr, num_inputs] of the latent's projection and, if it has one, its bias."""
    name = f"{prefix}.kv_a_proj_with_mqa"
    parts = [reader.take(f"{name}.weight", (mla.latent_width, num_inputs))]
    if has_bias:
        parts.append(reader.take(f"{name}.bias", (mla.latent_width,)))
    for part in parts:
        part[mla.kv_lora_rank :] = _half_split(part[mla.kv_lora_rank :], mla)
    return parts


def load_query(
    reader: WeightReader,
    name: str,
    num_inputs: int,
    num_q_heads: int,
    mla: MLAConfig,
    heads: range,
) -> Tensor:
    """The rows of `heads` among the model's num_q_heads: [Hq * (dn + dr), num_inputs]."""
    width = mla.qk_head_dim
    shape = (num_q_heads * width, num_inputs)
    rows = range(heads.start * width, heads.stop * width)
    weight = reader.take(name, shape, rows=rows).view(len(heads), width, num_inputs)
    rope = weight[:, mla.qk_nope_head_dim :]
    weight[:, mla.qk_nope_head_dim :] = _half_split(rope.transpose(0, 1), mla).transpose(0, 1)
    return weight.view(-1, num_inputs)


def _half_split(rope: Tensor, mla: MLAConfig) -> Tensor:
    """rope [dr, ...] with interleaved pairs -> the even ones, then the odd ones; a copy."""
    if not mla.rope_interleave:
        return rope.clone()
    return torch.cat((rope[0::2], rope[1::2]))


def load_expansion(
    reader: WeightReader, prefix: str, num_q_heads: int, mla: MLAConfig, heads: range
) -> LatentExpansion:
    """The up-projections out of the latent of `heads` among the model's num_q_heads."""
    width = mla.qk_nope_head_dim + mla.v_head_dim
    weight = reader.take(
        f"{prefix}.kv_b_proj.weight",
        (num_q_heads * width, mla.kv_lora_rank),
        rows=range(heads.start * width, heads.stop * width),
    ).view(len(heads), width, mla.kv_lora_rank)
    key, value = weight[:, : mla.qk_nope_head_dim], weight[:, mla.qk_nope_head_dim :]
    return LatentExpansion(key.contiguous(), value.transpose(1, 2).contiguous())
