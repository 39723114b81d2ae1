"""One transformer layer of a drafter."""

from __future__ import annotations

from torch import Tensor

from kvbraid.model.attention_port import LayerAttention
from kvbraid.model.layers import GatedMLP, load_mlp, load_norm
from kvbraid.model.rope import RopeTables
from kvbraid.model.weight_reader import WeightReader
from kvbraid.speculative.draft_attention import load_attention
from kvbraid.speculative.drafter_config import DrafterConfig


class DraftLayer:
    """Attention and MLP; what the attention reads and what it is added to are the caller's."""

    def __init__(
        self, reader: WeightReader, config: DrafterConfig, layer: int, num_inputs: int
    ) -> None:
        prefix, width = f"layers.{layer}", config.hidden_size
        self._attention = load_attention(reader, config, layer, num_inputs)
        self._mlp_norm = load_norm(
            reader, f"{prefix}.post_attention_layernorm", width, config.rms_norm_eps
        )
        self._mlp: GatedMLP = load_mlp(
            reader,
            f"{prefix}.mlp",
            hidden_size=width,
            intermediate_size=config.intermediate_size,
            part=range(config.intermediate_size),
            has_bias=config.mlp_bias,
            adds_bias=True,
        )

    def key_rows(self, x: Tensor, tables: RopeTables) -> tuple[Tensor, ...]:
        """See DraftAttention.key_rows."""
        return self._attention.key_rows(x, tables)

    def forward(
        self, x: Tensor, residual: Tensor, tables: RopeTables, attention: LayerAttention
    ) -> Tensor:
        """x [T, num_inputs], normed; residual [T, hidden], left alone -> [T, hidden]."""
        hidden = self._attention.forward(x, tables, attention).add_(residual)
        return hidden.add_(self._mlp.forward(self._mlp_norm.forward(hidden)))
