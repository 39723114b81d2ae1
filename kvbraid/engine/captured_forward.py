"""Decode and verify steps as captured graphs: a step is three uploads and one replay.

A graph serves one batch size and one window width, with taps or without; smaller batches are
padded with sequences of length 0, whose KV goes to the sink. Sizes are powers of two, so that
padding at most doubles the rows; widths are exact, since a row of padding in each window would cost
as much as a draft.

A graph is captured when its size is first needed: sizes times widths are many, a worker uses few
of them, and one that only prefills uses none, so a start that captured all would be long for
nothing. A worker with a drafter generates with the windows that it may choose before it serves. A
capture costs two passes over padding; what the first of them compiles, an eager step would compile
as well. All ranks meet the same step plan, so all capture the same graph at the same step.

A replay that waits for a rank that has died ends as an eager step does: the host waits for the
sampled tokens while the heartbeats, in threads of their own, end the worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attention.decode_buffers import DecodeBuffers
from attention.interface import DecodeBatch
from kvbraid.engine.step_attention import StepAttention
from kvbraid.engine.step_forward import EagerForward, ForwardOutput, RankModel, StepBatch
from kvbraid.kv.slots import LogicalSlots
from kvbraid.model.graph_capture import GraphCapture, graph_size
from kvbraid.model.layer_taps import LayerTaps

_SINK_SLOT = 0
_PADDING_TOKEN = 0
_MASK = "causal"


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Bounds of every decode and verify step.

    max_num_seqs: sequences. max_window: tokens a sequence. max_model_len: tokens of a sequence
    before its window. dtype: of the model.
    """

    max_num_seqs: int
    max_window: int
    max_model_len: int
    dtype: torch.dtype

    def batch_size(self, num_seqs: int) -> int:
        """Sequences of the graph that serves this many: a power of two, or the most.

        Raises ValueError outside [1, max_num_seqs].
        """
        if not 1 <= num_seqs <= self.max_num_seqs:
            raise ValueError(f"{num_seqs} sequences are outside [1, {self.max_num_seqs}]")
        return graph_size(num_seqs, self.max_num_seqs)


class CapturedForward:
    """Replays a graph for steps of decode windows only; steps with chunks run eagerly."""

    def __init__(self, rank: RankModel, limits: DecodeLimits, graphs: GraphCapture) -> None:
        """Raises NotImplementedError where the attention's backend cannot be captured."""
        self._rank = rank
        self._limits = limits
        self._capture = graphs
        self._eager = EagerForward(rank)
        self._outputs = _new_outputs(rank, limits)
        self._graphs: dict[tuple[int, int, bool], _DecodeGraph] = {}
        # The largest first: the smaller ones then share its workspace.
        self._largest = _reserve(rank, limits, limits.max_num_seqs, limits.max_window)

    @property
    def captured(self) -> tuple[tuple[int, int, bool], ...]:
        """(batch size, window width, with taps) of the graphs that there are, in the order of
        capture."""
        return tuple(self._graphs)

    def run(self, batch: StepBatch) -> ForwardOutput:
        """See StepForward. Raises ValueError for a step outside the limits."""
        if batch.decode is None or batch.extend is not None:
            return self._eager.run(batch)
        return self._graph(batch.decode, with_taps=batch.with_taps).run(batch, batch.decode)

    def close(self) -> None:
        """Drop the graphs: NCCL's communicators, which they hold, end with the process after it."""
        self._graphs.clear()

    def _graph(self, decode: DecodeBatch, *, with_taps: bool) -> _DecodeGraph:
        # With taps also on ranks that have none: a capture's passes are all ranks' together.
        size, window = self._limits.batch_size(len(decode.seq_lens)), decode.window
        graph = self._graphs.get((size, window, with_taps))
        if graph is None:
            if window > self._limits.max_window:
                raise ValueError(f"window {window} is above {self._limits.max_window}")
            outputs = self._outputs if with_taps else self._outputs._replace(fused=None)
            graph = _DecodeGraph(self._rank, self._limits, size, window, outputs)
            graph.capture(self._capture)
            self._graphs[size, window, with_taps] = graph
        return graph


class _DecodeGraph:
    """The graph of one batch size and window width, and what is written before each replay."""

    def __init__(
        self,
        rank: RankModel,
        limits: DecodeLimits,
        batch_size: int,
        window: int,
        outputs: ForwardOutput,
    ) -> None:
        """outputs: of all graphs, [most tokens, ...]; rows are fused where there is room."""
        self._rank = rank
        self._batch_size = batch_size
        self._num_tokens = batch_size * window
        self._buffers = _reserve(rank, limits, batch_size, window)
        self._inputs = torch.full(
            (2, self._num_tokens), _PADDING_TOKEN, dtype=torch.int64, device=rank.device
        )
        self._outputs = _first_rows(outputs, self._num_tokens)
        sinks = np.full(self._num_tokens, _SINK_SLOT, dtype=np.int64)
        nothing = DecodeBatch(
            seq_lens=torch.zeros(batch_size, dtype=torch.int32),
            page_table=torch.zeros(batch_size, 1, dtype=torch.int32),
            window=window,
            window_mask=_MASK,
        )
        self._step = StepAttention(
            attention=rank.attention,
            pool=rank.pool,
            write_plan=rank.pool.write_plan(LogicalSlots(sinks)),
            num_decode_tokens=self._num_tokens,
            decode_plan=rank.attention.plan_decode(nothing, rank.device, into=self._buffers),
            extend_plan=None,
        )
        self._replay: Callable[[], None] | None = None

    def capture(self, graphs: GraphCapture) -> None:
        """Over padding only: no sequence's KV is touched."""
        self._replay = graphs.capture(self._compute)

    def run(self, batch: StepBatch, decode: DecodeBatch) -> ForwardOutput:
        """The step's rows; `decode` is the batch's."""
        assert self._replay is not None
        self._write_inputs(batch)
        self._rank.pool.write_plan(batch.slots, into=self._step.write_plan)
        self._rank.attention.plan_decode(
            padded(decode, self._batch_size), self._rank.device, into=self._buffers
        )
        self._replay()
        return _first_rows(self._outputs, len(batch.token_ids))

    def _compute(self) -> None:
        rank, (hidden, fused) = self._rank, self._outputs
        taps = None
        if fused is not None and rank.fusion is not None:
            taps = LayerTaps(rank.fusion)
        hidden.copy_(rank.model.forward(self._inputs[0], self._inputs[1], self._step, taps))
        if fused is not None and taps is not None:
            fused.copy_(taps.fused())

    def _write_inputs(self, batch: StepBatch) -> None:
        # Pinned memory of torch's host allocator is not given out again before the copy is done.
        staging = torch.full(
            (2, self._num_tokens),
            _PADDING_TOKEN,
            dtype=torch.int64,
            pin_memory=self._rank.device.type == "cuda",
        )
        given = staging[:, : len(batch.token_ids)].numpy()
        given[0], given[1] = batch.token_ids, batch.positions
        self._inputs.copy_(staging, non_blocking=True)


def padded(decode: DecodeBatch, batch_size: int) -> DecodeBatch:
    """`decode` with sequences of length 0 behind its own, batch_size in all."""
    num_missing = batch_size - len(decode.seq_lens)
    if not num_missing:
        return decode
    lens, table = decode.seq_lens, decode.page_table
    return replace(
        decode,
        seq_lens=torch.cat((lens, lens.new_zeros(num_missing))),
        page_table=torch.cat((table, table.new_zeros(num_missing, table.shape[1]))),
    )


def _reserve(rank: RankModel, limits: DecodeLimits, batch_size: int, window: int) -> DecodeBuffers:
    return rank.attention.decode_buffers(
        batch_size=batch_size,
        max_len=limits.max_model_len,
        window=window,
        window_mask=_MASK,
        dtype=limits.dtype,
        kv_dtype=rank.pool.spec.dtype,
        device=rank.device,
    )


def _new_outputs(rank: RankModel, limits: DecodeLimits) -> ForwardOutput:
    num_tokens = limits.max_num_seqs * limits.max_window
    width = rank.model.config.hidden_size

    def rows(width: int) -> Tensor:
        return torch.zeros(num_tokens, width, dtype=limits.dtype, device=rank.device)

    return ForwardOutput(
        rows(width), None if rank.fusion is None else rows(rank.fusion.fused_width)
    )


def _first_rows(outputs: ForwardOutput, num_rows: int) -> ForwardOutput:
    hidden, fused = outputs
    return ForwardOutput(hidden[:num_rows], None if fused is None else fused[:num_rows])
