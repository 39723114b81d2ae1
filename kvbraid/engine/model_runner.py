"""Runs the model for one step on one rank: tokens and pages in, sampled tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.interface import DecodeBatch, ExtendBatch, Group
from kvbraid.engine.device_upload import uploaded
from kvbraid.engine.rank_state import RankSequence, RankState
from kvbraid.engine.sampler import SampleResult, sample
from kvbraid.engine.sampling_state import build_rows
from kvbraid.engine.step_forward import StepBatch, StepForward
from kvbraid.engine.step_plan import Extend
from kvbraid.kv.page_pool import StripedPagePool
from kvbraid.kv.slots import LogicalSlots, slots_of_tokens
from kvbraid.model.causal_lm import CausalLM

Int64Array = NDArray[np.int64]


# Rows of padding tokens go to the first row of the sink page.
_SINK_SLOT = 0
_PADDING_TOKEN = 0


class _Inputs(NamedTuple):
    """token_ids, positions: [T] int64; decode windows first, then the chunks.
    sampled_rows: rows of the hidden states that get logits."""

    token_ids: Int64Array
    positions: Int64Array
    slots: LogicalSlots
    sampled_rows: list[int]


@dataclass(frozen=True, slots=True)
class WindowedDecode:
    """Sequences that compute a window of w tokens each: the newest token, then drafts.

    drafts: token ids for each sequence, none for plain decoding. A sequence with fewer than the
    longest has padding behind its own, which nothing attends to.
    """

    sequences: Sequence[RankSequence]
    drafts: Sequence[tuple[int, ...]]

    @property
    def window(self) -> int:
        """Tokens a sequence, padding included."""
        return 1 + max(map(len, self.drafts), default=0)


class RowSink(Protocol):
    """Takes what a drafter needs to see of each token."""

    def take(self, slots: LogicalSlots, rows: Tensor) -> None:
        """Fused rows [T, d] of the tokens in `slots`; those in the sink are padding."""
        ...

    def renew(self, pages: Sequence[int]) -> None:
        """These pages have a new owner."""
        ...


class ModelRunner:
    """One rank's model, pool and attention. Every rank of a worker calls it in lockstep."""

    def __init__(
        self,
        *,
        model: CausalLM,
        forward: StepForward,
        pool: StripedPagePool,
        state: RankState,
        tp_group: Group,
        device: torch.device,
        row_sink: RowSink | None = None,
    ) -> None:
        """forward: of this model and pool. row_sink: of the rank that feeds the drafter; the other
        ranks have none."""
        self.model = model
        self.pool = pool
        self._forward = forward
        self._state = state
        self._tp_group = tp_group
        self._device = device
        self._row_sink = row_sink

    def renew_pages(self, pages: Sequence[int], num_computed: int) -> None:
        """A sequence gets `pages`, of which the first hold its num_computed tokens already; what
        was kept for the others is not its own."""
        if self._row_sink is not None:
            self._row_sink.renew(pages[num_computed // self.pool.stripe.logical_page_size :])

    def close(self) -> None:
        """There are no more steps."""
        self._forward.close()

    @torch.inference_mode()
    def forward(
        self, decode: WindowedDecode, extends: Sequence[Extend], *, with_taps: bool
    ) -> Tensor:
        """Writes the KV of every token and returns the logits of this rank's vocabulary shard,
        [N, V_local] float32: one a token of each decode window, padding left out, then one a
        chunk that samples. with_taps: the sink, where there is one, gets the rows of all."""
        inputs = self._inputs(decode, extends)
        batch = StepBatch(
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            self._decode_batch(decode),
            self._extend_batch(extends),
            with_taps=with_taps,
        )
        hidden, fused = self._forward.run(batch)
        if self._row_sink is not None and fused is not None:
            self._row_sink.take(inputs.slots, fused)
        if len(inputs.sampled_rows) != hidden.shape[0]:
            rows = torch.tensor(inputs.sampled_rows, dtype=torch.int64)
            hidden = hidden.index_select(0, uploaded(rows, self._device))
        return self.model.compute_logits(hidden)

    def _inputs(self, decode: WindowedDecode, extends: Sequence[Extend]) -> _Inputs:
        token_ids: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        padding: list[int] = []
        sampled_rows: list[int] = []
        window = decode.window
        for sequence, drafts in zip(decode.sequences, decode.drafts, strict=True):
            newest, first = len(sequence.token_ids) - 1, len(token_ids)
            num_padding = window - 1 - len(drafts)
            token_ids += (sequence.token_ids[newest], *drafts, *[_PADDING_TOKEN] * num_padding)
            positions += range(newest, newest + 1 + len(drafts))
            positions += [newest] * num_padding
            owners += [sequence.slot] * window
            sampled_rows += range(first, first + 1 + len(drafts))
            padding += range(first + 1 + len(drafts), len(token_ids))
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
        slots.array[padding] = _SINK_SLOT
        return _Inputs(np.array(token_ids, dtype=np.int64), position_array, slots, sampled_rows)

    def _decode_batch(self, decode: WindowedDecode) -> DecodeBatch | None:
        if not decode.sequences:
            return None
        lengths = [len(s.token_ids) for s in decode.sequences]
        seq_lens = np.array(lengths, dtype=np.int32) + np.int32(decode.window - 1)
        return DecodeBatch(
            seq_lens=torch.from_numpy(seq_lens),
            # A window's own rows are in hand, and padding has no page: the table ends before.
            page_table=self._page_table([s.slot for s in decode.sequences], max(lengths)),
            window=decode.window,
        )

    def _extend_batch(self, extends: Sequence[Extend]) -> ExtendBatch | None:
        if not extends:
            return None
        longest = max(e.start + e.length for e in extends)
        return ExtendBatch(
            prefix_lens=[e.start for e in extends],
            chunk_lens=[e.length for e in extends],
            page_table=self._page_table([e.slot for e in extends], longest),
        )

    def _page_table(self, slots: list[int], longest: int) -> Tensor:
        num_pages = -(-longest // self.pool.stripe.logical_page_size)
        return torch.from_numpy(self._state.page_table[slots, :num_pages])

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        sequences: Sequence[RankSequence],
        assumed: Sequence[tuple[int, ...]],
    ) -> SampleResult:
        """The next token of each row of `logits`; equal on every rank.

        sequences: whose row it is. assumed: the drafts before it, taken as accepted."""
        rows = build_rows(
            [s.sampling for s in sequences],
            positions=[
                len(s.token_ids) + len(drafts) for s, drafts in zip(sequences, assumed, strict=True)
            ],
            assumed=assumed,
            vocab_shard=self.model.vocab_shard,
            device=self._device,
        )
        return sample(logits, self.model.vocab_shard.start, self._tp_group, rows)
