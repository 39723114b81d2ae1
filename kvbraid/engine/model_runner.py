"""Runs the model for one step on one rank: tokens and pages in, sampled tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.dcp import DcpAttention, DecodePlan, ExtendPlan
from attention.interface import DecodeBatch, ExtendBatch, Group
from kvbraid.engine.rank_state import RankSequence, RankState
from kvbraid.engine.sampler import SampleResult, sample
from kvbraid.engine.sampling_state import build_rows
from kvbraid.engine.step_attention import StepAttention
from kvbraid.engine.step_plan import Extend
from kvbraid.kv.page_pool import StripedPagePool
from kvbraid.kv.slots import LogicalSlots, slots_of_tokens
from kvbraid.model.causal_lm import CausalLM

Int64Array = NDArray[np.int64]


class _Inputs(NamedTuple):
    """token_ids, positions: [T] int64; decode windows first, then the chunks.
    sampled_rows: rows of the hidden states that get logits."""

    token_ids: Int64Array
    positions: Int64Array
    slots: LogicalSlots
    sampled_rows: list[int]


@dataclass(frozen=True, slots=True)
class WindowedDecode:
    """Sequences that compute a window of w tokens each: the newest token and w - 1 guesses.

    guesses: w - 1 token ids a sequence; empty for plain decoding.
    """

    sequences: Sequence[RankSequence]
    guesses: Sequence[tuple[int, ...]]
    window_mask: str = "causal"

    @property
    def window(self) -> int:
        """Tokens a sequence."""
        return 1 + (len(self.guesses[0]) if self.guesses else 0)


class ModelRunner:
    """One rank's model, pool and attention. Every rank of a worker calls it in lockstep."""

    def __init__(
        self,
        *,
        model: CausalLM,
        attention: DcpAttention,
        pool: StripedPagePool,
        state: RankState,
        tp_group: Group,
        device: torch.device,
    ) -> None:
        self.model = model
        self.pool = pool
        self._attention = attention
        self._state = state
        self._tp_group = tp_group
        self._device = device

    @torch.inference_mode()
    def forward(self, decode: WindowedDecode, extends: Sequence[Extend]) -> Tensor:
        """Writes the KV of every token and returns the logits of this rank's vocabulary shard,
        [N, V_local] float32: w rows a decoding sequence, then one a chunk that samples."""
        inputs = self._inputs(decode, extends)
        num_decode_tokens = len(decode.sequences) * decode.window
        step = StepAttention(
            attention=self._attention,
            pool=self.pool,
            write_plan=self.pool.write_plan(inputs.slots),
            num_decode_tokens=num_decode_tokens,
            decode_plan=self._decode_plan(decode),
            extend_plan=self._extend_plan(extends),
        )
        hidden = self.model.forward(
            torch.from_numpy(inputs.token_ids).to(self._device),
            torch.from_numpy(inputs.positions).to(self._device),
            step,
        )
        if len(inputs.sampled_rows) != hidden.shape[0]:
            rows = torch.tensor(inputs.sampled_rows, dtype=torch.int64, device=self._device)
            hidden = hidden.index_select(0, rows)
        return self.model.compute_logits(hidden)

    def _inputs(self, decode: WindowedDecode, extends: Sequence[Extend]) -> _Inputs:
        token_ids: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        for index, sequence in enumerate(decode.sequences):
            newest = len(sequence.token_ids) - 1
            token_ids.append(sequence.token_ids[newest])
            if decode.guesses:
                token_ids += decode.guesses[index]
            positions += range(newest, newest + decode.window)
            owners += [sequence.slot] * decode.window
        sampled_rows = list(range(len(token_ids)))
        for extend in extends:
            end = extend.start + extend.length
            token_ids += self._state[extend.slot].token_ids[extend.start : end]
            positions += range(extend.start, end)
            owners += [extend.slot] * extend.length
            if extend.sample:
                sampled_rows.append(len(token_ids) - 1)
        position_array = np.array(positions, dtype=np.int64)
        slots = slots_of_tokens(
            self._state.page_table,
            np.array(owners, dtype=np.int64),
            position_array,
            self.pool.stripe.logical_page_size,
        )
        return _Inputs(np.array(token_ids, dtype=np.int64), position_array, slots, sampled_rows)

    def _decode_plan(self, decode: WindowedDecode) -> DecodePlan | None:
        if not decode.sequences:
            return None
        lengths = [len(s.token_ids) - 1 + decode.window for s in decode.sequences]
        batch = DecodeBatch(
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            page_table=self._page_table([s.slot for s in decode.sequences], max(lengths)),
            window=decode.window,
            window_mask=decode.window_mask,
        )
        return self._attention.plan_decode(batch, self._device)

    def _extend_plan(self, extends: Sequence[Extend]) -> ExtendPlan | None:
        if not extends:
            return None
        longest = max(e.start + e.length for e in extends)
        batch = ExtendBatch(
            prefix_lens=[e.start for e in extends],
            chunk_lens=[e.length for e in extends],
            page_table=self._page_table([e.slot for e in extends], longest),
        )
        return self._attention.plan_extend(batch, self._device)

    def _page_table(self, slots: list[int], longest: int) -> Tensor:
        num_pages = -(-longest // self.pool.stripe.logical_page_size)
        return torch.from_numpy(self._state.page_table[slots, :num_pages])

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequences: Sequence[RankSequence]) -> SampleResult:
        """The next token of each sequence from its row of `logits`; equal on every rank."""
        rows = build_rows(
            [s.sampling for s in sequences],
            positions=[len(s.token_ids) for s in sequences],
            vocab_shard=self.model.vocab_shard,
            device=self._device,
        )
        return sample(logits, self.model.vocab_shard.start, self._tp_group, rows)
