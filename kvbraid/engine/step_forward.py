"""One forward pass of a rank over a step's tokens, and how it is launched: eagerly here, or as
captured graphs in `captured_forward`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.dcp import DcpAttention
from attention.interface import DecodeBatch, ExtendBatch
from kvbraid.engine.device_upload import uploaded
from kvbraid.engine.step_attention import StepAttention
from kvbraid.kv.page_pool import StripedPagePool
from kvbraid.kv.slots import LogicalSlots
from kvbraid.model.causal_lm import CausalLM
from kvbraid.model.layer_taps import Fusion, LayerTaps

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What a step computes: decode windows first, then the chunks.

    token_ids, positions: int64 [T]. slots: where each token's KV goes, the sink for padding.
    decode, extend: None where there are none. with_taps: on ranks that feed a drafter.
    """

    token_ids: Int64Array
    positions: Int64Array
    slots: LogicalSlots
    decode: DecodeBatch | None
    extend: ExtendBatch | None
    with_taps: bool = False


class ForwardOutput(NamedTuple):
    """hidden: [T, hidden] after the final norm. fused: [T, d], what a drafter sees of each token,
    None where it is not wanted. Valid until the next pass."""

    hidden: Tensor
    fused: Tensor | None


class StepForward(Protocol):
    """Runs the layers over a step's tokens. Every rank of a worker calls it in lockstep."""

    def run(self, batch: StepBatch) -> ForwardOutput:
        """Writes the KV of every token."""
        ...

    def close(self) -> None:
        """Give back what is kept between steps; there are no more of them."""
        ...


@dataclass(frozen=True, slots=True)
class RankModel:
    """What a forward pass needs of a rank. fusion: None on ranks that feed no drafter."""

    model: CausalLM
    attention: DcpAttention
    pool: StripedPagePool
    device: torch.device
    fusion: Fusion | None = None


class EagerForward:
    """Launches every kernel anew: serves all steps on all devices."""

    def __init__(self, rank: RankModel) -> None:
        self._rank = rank

    def run(self, batch: StepBatch) -> ForwardOutput:
        """See StepForward."""
        rank, decode, extend = self._rank, batch.decode, batch.extend
        step = StepAttention(
            attention=rank.attention,
            pool=rank.pool,
            write_plan=rank.pool.write_plan(batch.slots),
            num_decode_tokens=0 if decode is None else len(decode.seq_lens) * decode.window,
            decode_plan=None if decode is None else rank.attention.plan_decode(decode, rank.device),
            extend_plan=None if extend is None else rank.attention.plan_extend(extend, rank.device),
        )
        taps = None
        if batch.with_taps and rank.fusion is not None:
            taps = LayerTaps(rank.fusion)
        hidden = rank.model.forward(
            uploaded(torch.from_numpy(batch.token_ids), rank.device),
            uploaded(torch.from_numpy(batch.positions), rank.device),
            step,
            taps,
        )
        return ForwardOutput(hidden, None if taps is None else taps.fused())

    def close(self) -> None:
        """Nothing is kept."""
