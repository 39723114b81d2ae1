"""Building blocks of every family. T tokens, all tensors in the model's dtype unless said."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.interface import Group
from kvbraid.model.matrix_product import matrix_product
from kvbraid.model.parallel import ParallelContext
from kvbraid.model.rms_norm import RMSNorm, rms_norm
from kvbraid.model.weight_reader import WeightReader


class Projection:
    """x @ weight (+ bias) for matrices that share their input."""

    __slots__ = ("_product",)

    def __init__(self, parts: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> None:
        """parts: matrices [out_i, in]; biases: [out_i] each; the outputs are concatenated."""
        self._product = matrix_product(parts, torch.cat(list(biases)) if biases else None)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, sum of out_i]."""
        return self._product.forward(x)


class GatedMLP:
    """down(silu(gate(x)) * up(x)); with tensor parallelism a partial sum over the ranks."""

    __slots__ = ("_down", "_gate_up", "_size")

    def __init__(self, gate_up: Projection, down: Projection, size: int) -> None:
        self._gate_up = gate_up
        self._down = down
        self._size = size

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        gate_up = self._gate_up.forward(x)
        gate = F.silu(gate_up[:, : self._size], inplace=True)
        return self._down.forward(gate.mul_(gate_up[:, self._size :]))


def load_mlp(
    reader: WeightReader,
    prefix: str,
    *,
    hidden_size: int,
    intermediate_size: int,
    part: range,
    has_bias: bool = False,
    adds_bias: bool = False,
) -> GatedMLP:
    """The rows `part` of a gated MLP of `intermediate_size`, named `prefix`.gate_proj and so on.

    adds_bias: whether this rank adds the output's bias.
    """
    wide, tall = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
    gate_up = [
        reader.take(f"{prefix}.{name}_proj.weight", wide, rows=part) for name in ("gate", "up")
    ]
    down = reader.take(f"{prefix}.down_proj.weight", tall, columns=part)
    biases: list[Tensor] = []
    down_bias: list[Tensor] = []
    if has_bias:
        shape = (intermediate_size,)
        biases = [
            reader.take(f"{prefix}.{name}_proj.bias", shape, rows=part) for name in ("gate", "up")
        ]
        down_bias = [reader.take(f"{prefix}.down_proj.bias", (hidden_size,))]
    return GatedMLP(
        Projection(gate_up, biases), Projection([down], down_bias if adds_bias else ()), len(part)
    )


def load_norm(reader: WeightReader, name: str, size: int, eps: float) -> RMSNorm:
    """The RMSNorm `name`."""
    weight = reader.take(f"{name}.weight", (size,), dtype=torch.float32)
    return rms_norm(weight, eps, reader.dtype)


def sum_over_ranks(partial: Tensor, group: Group) -> Tensor:
    """The sum of every rank's `partial`, in place; one collective, none for a single rank."""
    return group.all_reduce(partial) if group.size > 1 else partial


class VocabularyShard:
    """The token embedding and the output head, cut by vocabulary; one tensor when tied."""

    def __init__(
        self, embedding: Tensor, head: Tensor, shard: range, parallel: ParallelContext
    ) -> None:
        """embedding, head: [V_local, hidden] of the vocabulary ids in `shard`."""
        self.shard = shard
        self._embedding = embedding
        self._head = matrix_product([head])
        self._group = parallel.tp_group

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]."""
        if self._group.size == 1:
            return F.embedding(token_ids, self._embedding)
        local = token_ids - self.shard.start
        is_here = (local >= 0) & (local < len(self.shard))
        if self.shard:
            rows = F.embedding(local.clamp_(0, len(self.shard) - 1), self._embedding)
            rows.masked_fill_(~is_here[:, None], 0)
        else:
            rows = self._embedding.new_zeros(len(token_ids), self._embedding.shape[1])
        return self._group.all_reduce(rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, V_local]."""
        return self._head.forward(hidden).float()
