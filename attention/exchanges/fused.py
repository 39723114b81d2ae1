"""One launch after the split kernel: merge local splits, push to peers, merge the own heads.

Each rank has receive memory that its peers write. For a row of another rank's head, a program
merges this rank's splits and pushes the result straight into that rank's memory; for a row of an
own head, a program merges this rank's splits, waits until the same row has come from every peer,
and merges. Pushing costs one crossing of NVLink; pulling costs a flag's crossing and a round trip.

The wire. A word has 8 bytes: 4 of payload and the number of the step (launch) that wrote it, as
NCCL's low-latency protocol has. Memory stores 8 aligned bytes at once, so a reader that finds the
step's number in a word has that step's payload, and no fence is needed, which would cost another
round trip. Stores are write-through and loads volatile: Hopper's code has both at system scope. The
price is twice the bytes. Payload: outputs in the model dtype, LSEs in float32. A rank's own partial
stays float32, so the error is not above that of exchanges that are given outputs already rounded to
the model dtype.

No deadlock. Programs that push come first in the grid and wait for nothing; programs that wait
come last and wait only for what the peers' pushing programs write. The hardware starts programs
in order, so pushing programs never wait for room that waiting ones occupy.

Steps. Each program keeps its own count of launches in device memory, so graphs replay; the grid is
the same in each launch, so all counts are equal, on every rank. No program reads another's count.

No overwriting before reading. Memory is two slots, used by even and odd steps. Rank A writes to B
in step s only after A's launch s - 1 has ended, in which A waited for B's words of step s - 1 (a
rank without heads gets an arrival word instead). B wrote those in its launch s - 1, that is after
its launch s - 2 had ended, with everything of step s - 2 read. So the slot of step s, which is that
of step s - 2, is free. It follows that no rank is ever two steps ahead. All launches of one
exchange must therefore be on one stream, or ordered. (Kernels launched early by dependent launch
wait for the kernel before them to end before they end, so order on a stream is what it was.)

A place that is not used for exactly 2^32 steps would show an old word as new. At 10,000 steps a
second that is five days of one batch size being away, to the very step.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention.exchanges.base import ExchangeLimits, SymmetricGroup, SymmetricWords
from attention.exchanges.triton_pieces import head_starts
from attention.interface import AttentionResult, Group, SplitResult

if TYPE_CHECKING:
    from attention.dispatch import AttentionNeeds

MAX_RANKS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# float32 values of a program's tile of partial results, and widest and narrowest row of it.
_TILE = 4096
_MOST_COLS, _FEWEST_COLS = 512, 16
# A tile's slots are one of these, so that few variants are compiled; more take several tiles.
_BLOCK_SLOTS = (4, 16, 64, 128, 256)
_PROGRAMS_PER_SM = 8
# What the interpreter, which has no SMs, launches in each half of the grid.
_INTERPRETED_PROGRAMS = 3
_PAYLOAD_BYTES = 4


@dataclass(frozen=True, slots=True)
class FusedLayout:
    """Where the words of a rank's receive memory are. One slot: of each peer its rows' outputs,
    [rows, row_words], then their lses, [rows], then the arrival word."""

    max_tokens: int
    width: int
    dtype: torch.dtype
    head_splits: tuple[int, ...]

    @property
    def max_rows(self) -> int:
        """Rows for which there is room, of any rank."""
        return self.max_tokens * max(self.head_splits)

    @property
    def row_words(self) -> int:
        """Words of a row's output: whole 16 bytes."""
        return _even(-(-self.width * self.dtype.itemsize // _PAYLOAD_BYTES))

    @property
    def source_words(self) -> int:
        """Words of one peer in one slot: whole 16 bytes."""
        return _even(self.max_rows * (self.row_words + 1) + 1)

    @property
    def num_words(self) -> int:
        """Words of both slots."""
        return 2 * (len(self.head_splits) - 1) * self.source_words


@dataclass(frozen=True, slots=True)
class FusedMemory:
    """What an exchange owns. counts: int32 [2 * programs of a half]."""

    layout: FusedLayout
    words: SymmetricWords
    counts: Tensor

    @staticmethod
    def make(layout: FusedLayout, words: SymmetricWords, device: torch.device) -> FusedMemory:
        """With counts of zero."""
        programs = _INTERPRETED_PROGRAMS
        if device.type == "cuda":
            programs = _PROGRAMS_PER_SM * int(
                torch.cuda.get_device_properties(device).multi_processor_count
            )
        counts = torch.zeros(2 * programs, dtype=torch.int32, device=device)
        return FusedMemory(layout, words, counts)

    @property
    def num_programs(self) -> int:
        """Programs of a half of the grid."""
        return self.counts.shape[0] // 2


class FusedExchange:
    """The `fused` exchange. One instance belongs to one rank and one stream of launches."""

    name = "fused"

    def __init__(self) -> None:
        self._memory: FusedMemory | None = None

    def refusals(self, needs: AttentionNeeds) -> list[str]:
        """Devices and torch builds without symmetric memory, absent triton, dtypes and sizes."""
        reasons = []
        if needs.device != "cuda" or torch.version.hip is not None:
            reasons.append(f"device {needs.device!r} is not an NVIDIA GPU")
        if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
            reasons.append(f"torch {torch.__version__} has no symmetric memory")
        if importlib.util.find_spec("triton") is None:
            reasons.append("triton is not installed")
        if needs.dtype not in DTYPES:
            names = ", ".join(str(dtype) for dtype in DTYPES)
            reasons.append(f"dtype {needs.dtype} is not one of {names}")
        if needs.num_hosts > 1:
            reasons.append(f"the ranks of a group are on {needs.num_hosts} hosts, not on one")
        if needs.dcp_size > MAX_RANKS:
            reasons.append(f"dcp_size {needs.dcp_size} is above {MAX_RANKS}")
        return reasons

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The model dtype."""
        return dtype

    def allocate(
        self, limits: ExchangeLimits, width: int, head_splits: Sequence[int], group: Group
    ) -> None:
        """See SplitExchange. Bytes on each rank: 2 slots * (c - 1) peers * max_tokens *
        ceil(H / c) rows * (twice the row's output and 8 of its lse)."""
        if not isinstance(group, SymmetricGroup):
            raise ValueError(
                "exchange fused needs a group whose ranks map one another's memory: NCCL ranks of "
                f"one host, not {type(group).__name__}"
            )
        layout = FusedLayout(limits.max_tokens, width, limits.dtype, tuple(head_splits))
        words = group.symmetric_words(layout.num_words, limits.device)
        self._memory = FusedMemory.make(layout, words, limits.device)

    def check_tokens(self, num_tokens: int) -> None:
        """See SplitExchange."""
        most = self._allocated.layout.max_tokens
        if num_tokens > most:
            raise ValueError(
                f"a step of {num_tokens} tokens is above the {most} that exchange fused was "
                "sized for at start-up"
            )

    def combine(self, partial: AttentionResult, head_splits: Sequence[int], group: Group) -> Tensor:
        """See Exchange."""
        out, lse = (tensor.contiguous() for tensor in partial)
        nothing = out.new_empty(0, out.shape[1], out.shape[2], dtype=torch.float32)
        no_slots = out.new_empty(0, dtype=torch.int32)
        splits = SplitResult(out, lse, nothing, nothing[..., 0], no_slots, max_slots=0)
        return self.combine_splits(splits, head_splits, group)

    def combine_splits(
        self, splits: SplitResult, head_splits: Sequence[int], group: Group
    ) -> Tensor:
        """See SplitExchange."""
        memory, out = self._allocated, splits.out
        self.check_tokens(out.shape[0])
        layout = memory.layout
        given = (tuple(head_splits), out.shape[2], out.dtype)
        if given != (layout.head_splits, layout.width, layout.dtype):
            raise ValueError(f"heads, width, dtype {given} are not those of {layout}")
        merged = out.new_empty(out.shape[0], head_splits[group.rank], layout.width)
        if out.shape[0]:
            launch(memory, splits, merged, group.rank)
        return merged

    @property
    def _allocated(self) -> FusedMemory:
        if self._memory is None:
            raise RuntimeError("exchange fused is used before its memory is allocated")
        return self._memory


def launch(
    memory: FusedMemory,
    splits: SplitResult,
    merged: Tensor,
    rank: int,
    programs: range | None = None,
) -> None:
    """Run the kernel. programs: the part of the grid to launch, all unless given; the first half
    never waits, so that ranks that share a thread can run all first halves before a second one."""
    from attention.backends.decode_launch import launch_options
    from attention.exchanges import fused_kernel

    layout = memory.layout
    if programs is None:
        programs = range(2 * memory.num_programs)
    num_tokens, num_heads, width = splits.out.shape
    block_slots, block_cols = _tile(splits, width)
    fused_kernel.exchange_splits[(len(programs),)](
        *splits[:5],
        merged,
        *memory.words,
        memory.counts,
        num_tokens,
        programs.start,
        RANK=rank,
        SIZE=len(layout.head_splits),
        HEAD_STARTS=head_starts(layout.head_splits),
        WINDOW=splits.part_out.shape[1] // num_heads,
        DIM=width,
        ROW_WORDS=layout.row_words,
        MAX_ROWS=layout.max_rows,
        SOURCE_WORDS=layout.source_words,
        BLOCK_SLOTS=block_slots,
        BLOCK_COLS=block_cols,
        PROGRAMS=memory.num_programs,
        num_warps=2,
        **launch_options(merged.device),
    )


def _tile(splits: SplitResult, width: int) -> tuple[int, int]:
    """Slots (0: none) and columns of a tile of partial results.

    Of many sequences one may have all slots, but most have few: they decide.
    """
    widest = min(_MOST_COLS, max(_FEWEST_COLS, 1 << (width - 1).bit_length()))
    if not splits.max_slots:
        return 0, widest
    num_sequences = len(splits.slot_starts) - 1
    usual = min(splits.max_slots, max(2, 4 * len(splits.part_out) // num_sequences))
    block_slots = next((n for n in _BLOCK_SLOTS if n >= usual), _BLOCK_SLOTS[-1])
    return block_slots, min(widest, max(_FEWEST_COLS, _TILE // block_slots))


def _even(number: int) -> int:
    return number + number % 2
