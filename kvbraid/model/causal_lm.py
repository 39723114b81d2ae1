"""The decoder that every family shares: embedding, layers, final norm, output head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from attention.interface import GQAGeometry, MLAGeometry
from kvbraid.model.attention_port import LayerAttention
from kvbraid.model.config import ModelConfig
from kvbraid.model.layer_taps import LayerTaps
from kvbraid.model.layers import VocabularyShard
from kvbraid.model.rms_norm import RMSNorm
from kvbraid.model.rope import RopeTables, Rotary


class DecoderLayer(Protocol):
    """One layer of one rank."""

    def forward(self, hidden: Tensor, tables: RopeTables, attention: LayerAttention) -> Tensor:
        """[T, hidden] -> [T, hidden], equal on every rank; `hidden` may be overwritten."""
        ...


class CausalLM:
    """One rank's part of a model. Immutable after loading, so threads may share it.

    Every rank of the tensor-parallel group calls the same methods in the same order.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocabulary: VocabularyShard,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        rotary: Rotary,
    ) -> None:
        self.config = config
        self._vocabulary = vocabulary
        self._layers = tuple(layers)
        self._norm = norm
        self._rotary = rotary

    @property
    def vocab_shard(self) -> range:
        """Token ids whose logits this rank computes."""
        return self._vocabulary.shard

    @property
    def geometry(self) -> GQAGeometry | MLAGeometry:
        """Shape of the model's attention."""
        mla = self.config.mla
        if mla is None:
            return GQAGeometry(self.config.head_dim, self.config.softmax_scale)
        return MLAGeometry(
            kv_lora_rank=mla.kv_lora_rank,
            qk_nope_head_dim=mla.qk_nope_head_dim,
            qk_rope_head_dim=mla.qk_rope_head_dim,
            v_head_dim=mla.v_head_dim,
            softmax_scale=self.config.softmax_scale,
        )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: LayerAttention,
        taps: LayerTaps | None = None,
    ) -> Tensor:
        """token_ids, positions int64 [T] -> hidden [T, hidden] after the final norm.

        `attention` is called once a layer, in layer order. taps: shown the output of every layer.
        """
        hidden = self._vocabulary.embed(token_ids)
        tables = self._rotary.tables(positions, hidden.dtype)
        for index, layer in enumerate(self._layers):
            hidden = layer.forward(hidden, tables, attention)
            if taps is not None:
                taps.show(index, hidden)
        return self._norm.forward(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] of the rows wanted -> float32 [N, V_local], ids of `vocab_shard`."""
        return self._vocabulary.logits(hidden)
