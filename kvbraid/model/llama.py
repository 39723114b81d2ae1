"""Llama, Qwen2 and Qwen3: grouped-query attention and a gated MLP.

T tokens, Hq query heads projected here, Hk KV heads of the DCP group, Hl own query heads, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbraid.model.attention_port import LayerAttention
from kvbraid.model.config import ModelConfig
from kvbraid.model.layers import (
    GatedMLP,
    Projection,
    load_mlp,
    load_norm,
    sum_over_ranks,
)
from kvbraid.model.parallel import ParallelContext
from kvbraid.model.rms_norm import RMSNorm, rms_norm
from kvbraid.model.rope import RopeTables, rotate
from kvbraid.model.weight_reader import WeightReader


class LlamaLayer:
    """Attention and MLP of one layer on one rank."""

    def __init__(
        self,
        reader: WeightReader,
        config: ModelConfig,
        parallel: ParallelContext,
        layer: int,
    ) -> None:
        prefix = f"model.layers.{layer}"
        self._layer = layer
        self._group = parallel.tp_group
        self._head_dim = config.head_dim
        self._num_q_heads = len(parallel.q_heads)
        num_kv_heads = len(parallel.heads.group_kv_heads)
        self._num_rotated = self._num_q_heads + num_kv_heads
        self._num_heads = self._num_rotated + num_kv_heads
        eps = config.rms_norm_eps
        self._input_norm = load_norm(reader, f"{prefix}.input_layernorm", config.hidden_size, eps)
        self._mlp_norm = load_norm(
            reader, f"{prefix}.post_attention_layernorm", config.hidden_size, eps
        )
        self._qkv = _load_qkv(reader, config, parallel, prefix)
        self._qk_norm = _load_qk_norm(reader, config, parallel, prefix)
        self._output = load_output(
            reader, f"{prefix}.self_attn.o_proj", config, parallel, config.head_dim
        )
        self._mlp: GatedMLP = load_mlp(
            reader,
            f"{prefix}.mlp",
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            part=parallel.shard(config.intermediate_size),
            has_bias=config.mlp_bias,
            adds_bias=parallel.is_first_rank,
        )

    def forward(self, hidden: Tensor, tables: RopeTables, attention: LayerAttention) -> Tensor:
        """As DecoderLayer.forward."""
        attended = self._attend(self._input_norm.forward(hidden), tables, attention)
        hidden.add_(sum_over_ranks(attended, self._group))
        expanded = self._mlp.forward(self._mlp_norm.forward(hidden))
        return hidden.add_(sum_over_ranks(expanded, self._group))

    def _attend(self, x: Tensor, tables: RopeTables, attention: LayerAttention) -> Tensor:
        num_tokens = x.shape[0]
        qkv = self._qkv.forward(x).view(num_tokens, self._num_heads, self._head_dim)
        qk = qkv[:, : self._num_rotated]
        if self._qk_norm is not None:
            qk = self._qk_norm.forward(qk)
        qk = rotate(qk, tables)
        out = attention.gqa(
            self._layer,
            qk[:, : self._num_q_heads],
            qk[:, self._num_q_heads :],
            qkv[:, self._num_rotated :],
        )
        return self._output.forward(out.reshape(num_tokens, out.shape[1] * self._head_dim))


def _load_qkv(
    reader: WeightReader, config: ModelConfig, parallel: ParallelContext, prefix: str
) -> Projection:
    """q of this rank's (or its group's) heads, then k, then v of the group's KV heads."""
    dim = config.head_dim
    kv_heads = parallel.heads.group_kv_heads
    wanted = (
        ("q", config.num_q_heads, parallel.q_heads),
        ("k", config.num_kv_heads, kv_heads),
        ("v", config.num_kv_heads, kv_heads),
    )
    weights, biases = [], []
    for name, num_heads, heads in wanted:
        rows = range(heads.start * dim, heads.stop * dim)
        full = f"{prefix}.self_attn.{name}_proj"
        weights.append(
            reader.take(f"{full}.weight", (num_heads * dim, config.hidden_size), rows=rows)
        )
        if config.qkv_bias:
            biases.append(reader.take(f"{full}.bias", (num_heads * dim,), rows=rows))
    return Projection(weights, biases)


def _load_qk_norm(
    reader: WeightReader, config: ModelConfig, parallel: ParallelContext, prefix: str
) -> RMSNorm | None:
    """One norm over the query heads, then the KV heads: weight [Hq + Hk, D]."""
    if not config.qk_norm:
        return None
    dim = config.head_dim
    query, key = (
        reader.take(f"{prefix}.self_attn.{name}_norm.weight", (dim,), dtype=torch.float32)
        for name in ("q", "k")
    )
    num_q_heads, num_kv_heads = len(parallel.q_heads), len(parallel.heads.group_kv_heads)
    weight = torch.cat((query.expand(num_q_heads, dim), key.expand(num_kv_heads, dim)))
    return rms_norm(weight, config.rms_norm_eps, reader.dtype)


def load_output(
    reader: WeightReader,
    name: str,
    config: ModelConfig,
    parallel: ParallelContext,
    head_width: int,
) -> Projection:
    """The output projection's columns of this rank's own query heads."""
    heads = parallel.heads.local_q_heads
    weight = reader.take(
        f"{name}.weight",
        (config.hidden_size, config.num_q_heads * head_width),
        columns=range(heads.start * head_width, heads.stop * head_width),
    )
    biases = []
    if config.output_bias:
        biases = [reader.take(f"{name}.bias", (config.hidden_size,))]
    return Projection([weight], biases if parallel.is_first_rank else ())
