"""What a model layer asks of the engine: attention over a step's tokens, KV kept by the engine."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from attention.interface import LatentExpansion


class LayerAttention(Protocol):
    """Attention of one step. The engine writes the KV rows, splits the tokens into extend chunks
    and decode rows and returns this rank's heads.

    T tokens, Hq query heads given (the rank's own, or the DCP group's when q is replicated),
    Hl the rank's own query heads, Hk the group's KV heads.
    """

    def gqa(self, layer: int, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """q [T, Hq, D], key and value [T, Hk, D], rotary applied -> [T, Hl, D]."""
        ...

    def mla(
        self, layer: int, q_nope: Tensor, q_pe: Tensor, latent: Tensor, expansion: LatentExpansion
    ) -> Tensor:
        """q_nope [T, Hq, dn], q_pe [T, Hq, dr], latent [T, R + dr] (normed latent, then roped key),
        expansion for the Hq heads -> [T, Hl, dv]."""
        ...
