"""DSpark: a non-causal block [anchor, mask ...] over projected target rows, then a sequential head.

T tokens, B sequences, S slots of a block, k drafts, d draft width, r Markov rank, Vd vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvbraid.model.attention_port import LayerAttention
from kvbraid.model.layers import Projection, load_norm
from kvbraid.model.rope import Rotary
from kvbraid.model.weight_reader import WeightReader
from kvbraid.speculative.draft_attention import rope_width
from kvbraid.speculative.draft_graphs import DraftGraphs, draft_forward
from kvbraid.speculative.draft_kv import DraftKv
from kvbraid.speculative.draft_layer import DraftLayer
from kvbraid.speculative.drafter_config import DSparkConfig
from kvbraid.speculative.dspark_compute import DSparkCompute
from kvbraid.speculative.dspark_session import DSparkSession
from kvbraid.speculative.markov_head import load_markov_head
from kvbraid.speculative.vocabulary_weights import VocabularyWeights


class DSparkDrafter:
    """The weights. Immutable after loading."""

    def __init__(
        self, config: DSparkConfig, reader: WeightReader, vocabulary: VocabularyWeights
    ) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        layers = range(config.num_layers)
        self.config = config
        self.vocabulary = vocabulary
        self.window = config.block_size
        self.dtype = reader.dtype
        self.device = reader.device
        self._input_norms = [
            load_norm(reader, f"layers.{i}.input_layernorm", width, eps) for i in layers
        ]
        self._layers = [DraftLayer(reader, config, i, width) for i in layers]
        self._norm = load_norm(reader, "norm", width, eps)
        self._rotary = Rotary(config.rope, rope_width(config), reader.device)
        self.markov_head = load_markov_head(reader, config)
        self._confidence = _load_confidence(reader, config)
        self._mask_columns = vocabulary.columns_of(config.mask_token_id)

    def key_rows(self, rows: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """What the pool keeps of context rows [T, d] in each layer: the same rows go into every
        layer's own projections, without a norm of the layer."""
        tables = self._rotary.tables(positions, rows.dtype)
        return (layer.key_rows(rows, tables) for layer in self._layers)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: LayerAttention) -> Tensor:
        """Blocks, int64 [B * S] -> hidden [B * S, d] after the final norm."""
        hidden = self.vocabulary.embed(token_ids)
        tables = self._rotary.tables(positions, hidden.dtype)
        for norm, layer in zip(self._input_norms, self._layers, strict=True):
            hidden = layer.forward(norm.forward(hidden), hidden, tables, attention)
        return self._norm.forward(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, d] -> float32 [N, Vd], before the sequential head; never the mask token."""
        return self.vocabulary.logits(hidden).index_fill_(1, self._mask_columns, -torch.inf)

    def confidences(self, hidden: Tensor, embedded: Tensor) -> Tensor | None:
        """hidden [B, k, d] of the drafts' slots, embedded [B, k, r]: markov_w1 of the token before
        each -> float32 [B, k] in [0, 1]; None without a confidence head."""
        if self._confidence is None:
            return None
        inputs = hidden
        if self.config.confidence_with_markov:
            inputs = torch.cat((hidden, embedded), -1)
        logits = self._confidence.forward(inputs.flatten(0, 1)).float()
        return logits.sigmoid_().view(hidden.shape[:2])

    def open_session(self, kv: DraftKv, graphs: DraftGraphs | None = None) -> DSparkSession:
        """See Drafter."""
        return DSparkSession(self.config, draft_forward(DSparkCompute(self, kv), kv, graphs))


def _load_confidence(reader: WeightReader, config: DSparkConfig) -> Projection | None:
    if not config.has_confidence_head:
        return None
    num_inputs = config.hidden_size + config.confidence_with_markov * config.markov_rank
    weight = reader.take("confidence_head.proj.weight", (1, num_inputs))
    return Projection([weight], [reader.take("confidence_head.proj.bias", (1,))])
