"""DSpark's sequential head: a low-rank bigram bias on the logits of each slot.

r Markov rank, d draft width, V target and Vd draft vocabulary. The published forms differ in how
they make a latent [B, r] of the token before; its product with markov_w2 is the bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbraid.errors import CheckpointError
from kvbraid.model.layers import Projection
from kvbraid.model.weight_reader import WeightReader
from kvbraid.speculative.drafter_config import DSparkConfig


class MarkovCell(Protocol):
    """Latents of one block, asked for in the order of its drafts."""

    def latent(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """hidden [B, d], post-norm, of the draft's slot; embedded [B, r], markov_w1 of the token
        before -> [B, r]."""
        ...


class VanillaCell:
    """The embedded token itself."""

    def latent(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """See MarkovCell."""
        return embedded


class GatedCell:
    """sigmoid(gate_proj [h ; w1]) * w1."""

    def __init__(self, gate: Projection) -> None:
        self._gate = gate

    def latent(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """See MarkovCell."""
        return self._gate.forward(torch.cat((hidden, embedded), 1)).sigmoid_().mul_(embedded)


class RecurrentCell:
    """[z, c, o] = joint_proj [s ; w1 ; h], s = sig(z) s + (1 - sig(z)) tanh(c), latent tanh(o);
    s is 0 at the block's beginning."""

    def __init__(self, joint: Projection) -> None:
        self._joint = joint
        self._state: Tensor | None = None

    def latent(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """See MarkovCell."""
        state = torch.zeros_like(embedded) if self._state is None else self._state
        joint = self._joint.forward(torch.cat((state, embedded, hidden), 1))
        update, candidate, output = joint.chunk(3, dim=1)
        self._state = torch.lerp(candidate.tanh(), state, update.sigmoid())
        return output.tanh()


class MarkovHead:
    """Immutable after loading."""

    def __init__(
        self, embedding: Tensor, bias: Projection, new_cell: Callable[[], MarkovCell]
    ) -> None:
        """embedding: markov_w1 [V, r]; bias: markov_w2 [Vd, r]."""
        self._embedding = embedding
        self._bias = bias
        self.new_cell = new_cell

    def embed(self, token_ids: Tensor) -> Tensor:
        """Target token ids, int64 [B] -> [B, r]."""
        return F.embedding(token_ids, self._embedding)

    def bias(self, latent: Tensor) -> Tensor:
        """[B, r] -> float32 [B, Vd], fresh."""
        return self._bias.forward(latent).float()


def load_markov_head(reader: WeightReader, config: DSparkConfig) -> MarkovHead:
    """The head that the config names. Raises CheckpointError for a name that is not known."""
    load_cell = _CELLS.get(config.markov_head)
    if load_cell is None:
        accepted = ", ".join(_CELLS)
        raise CheckpointError(
            f"markov_head {config.markov_head!r} is not known; accepted: {accepted}"
        )
    rank = config.markov_rank
    embedding = reader.take("markov_head.markov_w1.weight", (config.vocab_size, rank))
    bias = reader.take("markov_head.markov_w2.weight", (config.draft_vocab_size, rank))
    return MarkovHead(embedding, Projection([bias]), load_cell(reader, config))


def _load_vanilla(reader: WeightReader, config: DSparkConfig) -> Callable[[], MarkovCell]:
    return VanillaCell


def _load_gated(reader: WeightReader, config: DSparkConfig) -> Callable[[], MarkovCell]:
    rank, width = config.markov_rank, config.hidden_size
    gate = _load_biased(reader, "markov_head.gate_proj", rank, width + rank)
    return lambda: GatedCell(gate)


def _load_recurrent(reader: WeightReader, config: DSparkConfig) -> Callable[[], MarkovCell]:
    rank, width = config.markov_rank, config.hidden_size
    joint = _load_biased(reader, "markov_head.joint_proj", 3 * rank, 2 * rank + width)
    return lambda: RecurrentCell(joint)


def _load_biased(reader: WeightReader, name: str, num_outputs: int, num_inputs: int) -> Projection:
    weight = reader.take(f"{name}.weight", (num_outputs, num_inputs))
    return Projection([weight], [reader.take(f"{name}.bias", (num_outputs,))])


_CELLS: Mapping[str, Callable[[WeightReader, DSparkConfig], Callable[[], MarkovCell]]] = {
    "vanilla": _load_vanilla,
    "gated": _load_gated,
    "rnn": _load_recurrent,
}
