"""Attention of a drafter's layer: projections around a paged cache, grouped-query or latent.

T tokens, Hq query and Hk KV heads, D head_dim, R latent rank, dn/dr nope and rope widths of a head.
A drafter runs whole on one device, so there are no shards here.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from attention.interface import GQAGeometry, MLAGeometry
from kvbraid.errors import CheckpointError
from kvbraid.model.attention_port import LayerAttention
from kvbraid.model.config import MLAConfig, attention_scale
from kvbraid.model.deepseek import LATENT_NORM_EPS, load_expansion, load_latent, load_query
from kvbraid.model.layers import Projection, load_norm
from kvbraid.model.rms_norm import RMSNorm
from kvbraid.model.rope import RopeTables, rotate
from kvbraid.model.weight_reader import WeightReader
from kvbraid.speculative.drafter_config import DrafterConfig


class DraftAttention(Protocol):
    """Attention of one layer."""

    def key_rows(self, x: Tensor, tables: RopeTables) -> tuple[Tensor, ...]:
        """x [T, in] -> what the pool keeps of these tokens: key and value [T, Hk, D], or one
        latent [T, R + dr] (normed latent, then roped key)."""
        ...

    def forward(self, x: Tensor, tables: RopeTables, attention: LayerAttention) -> Tensor:
        """x [T, in] -> [T, hidden]. `attention` writes the tokens' keys and attends."""
        ...


def attention_geometry(config: DrafterConfig) -> GQAGeometry | MLAGeometry:
    """Shape of the drafter's attention."""
    scale = attention_scale(config.head_dim, config.mla, config.rope)
    mla = config.mla
    if mla is None:
        return GQAGeometry(config.head_dim, scale)
    return MLAGeometry(
        kv_lora_rank=mla.kv_lora_rank,
        qk_nope_head_dim=mla.qk_nope_head_dim,
        qk_rope_head_dim=mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
        softmax_scale=scale,
    )


def load_attention(
    reader: WeightReader, config: DrafterConfig, layer: int, num_inputs: int
) -> DraftAttention:
    """The attention of `layer`, whose projections read `num_inputs` numbers a token."""
    if config.mla is None:
        return GroupedQueryAttention(reader, config, layer, num_inputs)
    return LatentDraftAttention(reader, config, config.mla, layer, num_inputs)


class GroupedQueryAttention:
    """Grouped-query attention, with or without RMSNorm on heads and biases."""

    def __init__(
        self, reader: WeightReader, config: DrafterConfig, layer: int, num_inputs: int
    ) -> None:
        prefix = f"layers.{layer}.self_attn"
        dim, eps = config.head_dim, config.rms_norm_eps
        q_rows, kv_rows = config.num_q_heads * dim, config.num_kv_heads * dim
        has_bias = config.qkv_bias
        self._layer = layer
        self._head_dim = dim
        self._num_kv_heads = config.num_kv_heads
        self._query = _load(reader, {f"{prefix}.q_proj": q_rows}, num_inputs, has_bias)
        key_value = {f"{prefix}.k_proj": kv_rows, f"{prefix}.v_proj": kv_rows}
        self._key_value = _load(reader, key_value, num_inputs, has_bias)
        self._output = _load(
            reader, {f"{prefix}.o_proj": config.hidden_size}, q_rows, config.output_bias
        )
        self._query_norm: RMSNorm | None = None
        self._key_norm: RMSNorm | None = None
        if config.qk_norm:
            self._query_norm = load_norm(reader, f"{prefix}.q_norm", dim, eps)
            self._key_norm = load_norm(reader, f"{prefix}.k_norm", dim, eps)

    def key_rows(self, x: Tensor, tables: RopeTables) -> tuple[Tensor, Tensor]:
        """See DraftAttention."""
        heads = self._key_value.forward(x).view(len(x), 2 * self._num_kv_heads, self._head_dim)
        key = heads[:, : self._num_kv_heads]
        if self._key_norm is not None:
            key = self._key_norm.forward(key)
        return rotate(key, tables), heads[:, self._num_kv_heads :]

    def forward(self, x: Tensor, tables: RopeTables, attention: LayerAttention) -> Tensor:
        """See DraftAttention."""
        query = self._query.forward(x).view(len(x), -1, self._head_dim)
        if self._query_norm is not None:
            query = self._query_norm.forward(query)
        key, value = self.key_rows(x, tables)
        out = attention.gqa(self._layer, rotate(query, tables), key, value)
        return self._output.forward(out.reshape(len(x), -1))


class LatentDraftAttention:
    """Latent attention as DeepSeek's; the drafter's query always has a low rank."""

    def __init__(
        self,
        reader: WeightReader,
        config: DrafterConfig,
        mla: MLAConfig,
        layer: int,
        num_inputs: int,
    ) -> None:
        if mla.q_lora_rank is None:
            raise CheckpointError(f"{config.dialect} drafter: q_lora_rank is mandatory with MLA")
        prefix = f"layers.{layer}.self_attn"
        heads = range(config.num_q_heads)
        rank = mla.q_lora_rank
        has_bias = config.qkv_bias
        self._layer = layer
        self._mla = mla
        self._query_down = _load(reader, {f"{prefix}.q_a_proj": rank}, num_inputs, has_bias)
        self._query_norm = load_norm(reader, f"{prefix}.q_a_layernorm", rank, LATENT_NORM_EPS)
        self._query_up = Projection(
            [load_query(reader, f"{prefix}.q_b_proj.weight", rank, len(heads), mla, heads)]
        )
        latent = load_latent(reader, prefix, num_inputs, mla, has_bias=has_bias)
        self._latent = Projection(latent[:1], latent[1:])
        self._latent_norm = load_norm(
            reader, f"{prefix}.kv_a_layernorm", mla.kv_lora_rank, LATENT_NORM_EPS
        )
        self._expansion = load_expansion(reader, prefix, len(heads), mla, heads)
        self._output = _load(
            reader,
            {f"{prefix}.o_proj": config.hidden_size},
            len(heads) * mla.v_head_dim,
            config.output_bias,
        )

    def key_rows(self, x: Tensor, tables: RopeTables) -> tuple[Tensor]:
        """See DraftAttention."""
        rank = self._mla.kv_lora_rank
        down = self._latent.forward(x)
        rope_key = rotate(down[:, None, rank:], tables)[:, 0]
        return (torch.cat((self._latent_norm.forward(down[:, :rank]), rope_key), 1),)

    def forward(self, x: Tensor, tables: RopeTables, attention: LayerAttention) -> Tensor:
        """See DraftAttention."""
        nope = self._mla.qk_nope_head_dim
        query = self._query_up.forward(self._query_norm.forward(self._query_down.forward(x)))
        query = query.view(len(x), -1, self._mla.qk_head_dim)
        (latent,) = self.key_rows(x, tables)
        out = attention.mla(
            self._layer,
            query[..., :nope],
            rotate(query[..., nope:], tables),
            latent,
            self._expansion,
        )
        return self._output.forward(out.reshape(len(x), -1))


def _load(
    reader: WeightReader, num_outputs: dict[str, int], num_inputs: int, has_bias: bool
) -> Projection:
    """The projections {name: outputs} of one input as one."""
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for name, size in num_outputs.items():
        weights.append(reader.take(f"{name}.weight", (size, num_inputs)))
        if has_bias:
            biases.append(reader.take(f"{name}.bias", (size,)))
    return Projection(weights, biases)


def rope_width(config: DrafterConfig) -> int:
    """Numbers of a head that are rotated."""
    return config.head_dim if config.mla is None else config.mla.qk_rope_head_dim
