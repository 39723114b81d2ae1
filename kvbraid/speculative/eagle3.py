"""EAGLE3: one layer over [embedding ; feature] pairs, run once a draft token.

T rows, d draft width. Row i pairs the feature of position i with token i + 1 and predicts token
i + 2; its rotary position is i. Formulas: SafeAILab/EAGLE and SpecForge, as published.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvbraid.model.attention_port import LayerAttention
from kvbraid.model.layers import load_norm
from kvbraid.model.rope import Rotary
from kvbraid.model.weight_reader import WeightReader
from kvbraid.speculative.draft_attention import rope_width
from kvbraid.speculative.draft_graphs import DraftGraphs, draft_forward
from kvbraid.speculative.draft_kv import DraftKv
from kvbraid.speculative.draft_layer import DraftLayer
from kvbraid.speculative.drafter_config import Eagle3Config
from kvbraid.speculative.eagle3_compute import Eagle3Compute
from kvbraid.speculative.eagle3_session import Eagle3Session
from kvbraid.speculative.vocabulary_weights import VocabularyWeights


class Eagle3Output(NamedTuple):
    """feature: [T, d], what the next row is paired with; logits: float32 [T, Vd]."""

    feature: Tensor
    logits: Tensor


class Eagle3Drafter:
    """The weights. Immutable after loading."""

    window = 1

    def __init__(
        self, config: Eagle3Config, reader: WeightReader, vocabulary: VocabularyWeights
    ) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.vocabulary = vocabulary
        self.dtype = reader.dtype
        self.device = reader.device
        self._token_norm = load_norm(reader, "layers.0.input_layernorm", width, eps)
        self._feature_norm = load_norm(reader, "layers.0.hidden_norm", width, eps)
        self._layer = DraftLayer(reader, config, 0, 2 * width)
        self._norm = load_norm(reader, "norm", width, eps)
        self._rotary = Rotary(config.rope, rope_width(config), reader.device)

    def key_rows(
        self, features: Tensor, token_ids: Tensor, positions: Tensor
    ) -> tuple[Tensor, ...]:
        """What the pool keeps of rows: features [T, d], token_ids and positions int64 [T]."""
        pair, _ = self._pair(features, token_ids)
        return self._layer.key_rows(pair, self._rotary.tables(positions, features.dtype))

    def forward(
        self, features: Tensor, token_ids: Tensor, positions: Tensor, attention: LayerAttention
    ) -> Eagle3Output:
        """Rows as in `key_rows`, of which `attention` writes the keys."""
        pair, residual = self._pair(features, token_ids)
        tables = self._rotary.tables(positions, features.dtype)
        hidden = self._layer.forward(pair, residual, tables, attention)
        normed = self._norm.forward(hidden)
        feature = normed if self.config.norm_output else hidden
        return Eagle3Output(feature, self.vocabulary.logits(normed))

    def open_session(self, kv: DraftKv, graphs: DraftGraphs | None = None) -> Eagle3Session:
        """See Drafter."""
        compute = Eagle3Compute(self, kv)
        return Eagle3Session(compute, draft_forward(compute, kv, graphs), kv.spare_slot)

    def _pair(self, features: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's input [T, 2d] and the residual [T, d]."""
        normed = self._feature_norm.forward(features)
        tokens = self._token_norm.forward(self.vocabulary.embed(token_ids))
        residual = normed if self.config.norm_before_residual else features
        return torch.cat((tokens, normed), 1), residual
