"""A step's SplitPlan on the device, and where it comes from: made for one step, or reserved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from attention.backends.scratch import Scratch
from attention.backends.split_plan import (
    WORKER_FIELDS,
    SplitBounds,
    SplitPlan,
    balanced_bounds,
    balanced_plan,
    fixed_bounds,
    fixed_plan,
    num_keyless_workers,
)
from attention.rows import DecodeBounds, DecodeRows

# Pieces start at multiples of this many keys, so that a tile never straddles two pages of that
# size and every tile size up to it can use one plan.
BLOCK_KEYS = 64

_PIECE_FIELDS = 5
# Of a piece and of a worker's record: where the keys end.
_PIECE_END, _WORKER_END = 2, 4
# Tables start and page table rows end at multiples of so many int32: kernels are compiled for
# pointers of 16 bytes and a stride of 16, and would be compiled again for others.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """What a launch shape asks of the plan. max_workers: programs for a block of rows of a KV head;
    min_blocks: fewest blocks of BLOCK_KEYS keys for which a program is worth starting."""

    max_workers: int
    min_blocks: int


class DevicePlan:
    """int32 tables in one buffer, so that one copy brings them all and addresses can be kept.

    workers, pieces, slot_starts, page_table: as the kernels read them; head_starts: [Hk + 1].
    num_workers: programs to launch for a block of rows; those that the plan does not need have no
    pieces. num_slots, max_slots: partial results of all sequences and most of one, at most.
    """

    def __init__(
        self,
        bounds: SplitBounds,
        *,
        batch_size: int,
        num_pages: int,
        head_starts: Sequence[int],
        device: torch.device,
        max_growth: int = 0,
    ) -> None:
        """num_pages: columns of the page table. max_growth: how often a plan may `grow`."""
        self._max_growth = max_growth
        self.num_workers = bounds.num_workers
        self.num_slots = bounds.num_slots
        self.max_slots = bounds.max_slots
        self._heads = head_starts
        self._sizes = (
            bounds.num_workers * WORKER_FIELDS,
            bounds.num_pieces * _PIECE_FIELDS,
            batch_size + 1,
            len(head_starts),
        )
        self._starts = [0]
        for size in self._sizes:
            self._starts.append(_aligned(self._starts[-1] + size))
        self._table_shape = (batch_size, _aligned(max(1, num_pages)))
        self._table_end = self._starts[-1] + batch_size * self._table_shape[1]
        # What `grow` adds to workers and pieces lies behind everything else.
        self._num_entries = self._table_end + (self._starts[2] if max_growth else 0)
        # An inference tensor could not be written again outside inference mode.
        with torch.inference_mode(False):
            self._buffer = torch.empty(self._num_entries, dtype=torch.int32, device=device)
        self.workers, self.pieces, self.slot_starts, self.head_starts = (
            self._buffer[start : start + size]
            for start, size in zip(self._starts, self._sizes, strict=False)
        )
        self.page_table = self._buffer[self._starts[-1] : self._table_end].view(self._table_shape)

    def upload(self, plan: SplitPlan, rows: DecodeRows) -> None:
        """Replace the tables. One copy, in the order of the current stream; the host waits only for
        a device that shares its memory. `plan` and `rows` must be within the bounds."""
        # Pinned memory of torch's host allocator is not given out again before the copy is done.
        staging = torch.empty(
            self._num_entries, dtype=torch.int32, pin_memory=self._buffer.device.type == "cuda"
        )
        self._write(staging.numpy(), plan, rows)
        self._buffer.copy_(staging, non_blocking=True)

    def grow(self) -> None:
        """Give the last piece of every sequence with keys one key more, in stream order."""
        growth = self._buffer[self._table_end :]
        self._buffer[: len(growth)].add_(growth)

    def _write(self, entries: np.ndarray, plan: SplitPlan, rows: DecodeRows) -> None:
        pages = rows.page_table.numpy()
        records = plan.worker_records(lambda b, i: int(pages[b, i]), rows.page_size)
        pieces = [field for piece in plan.pieces for field in piece]
        # Workers without a record have no pieces.
        entries[: self._starts[-1]] = 0
        for start, values in zip(
            self._starts, (records, pieces, plan.slot_starts, self._heads), strict=False
        ):
            entries[start : start + len(values)] = values
        used = pages_used(rows, self._max_growth)
        table = entries[self._starts[-1] : self._table_end].reshape(self._table_shape)
        table[:, :used] = pages[:, :used]
        if self._max_growth:
            self._write_growth(entries, rows, len(plan.pieces), plan.num_workers)

    def _write_growth(
        self, entries: np.ndarray, rows: DecodeRows, num_pieces: int, num_workers: int
    ) -> None:
        """1 where a sequence's keys end, once its other tables are there; 0 elsewhere."""
        growth = entries[self._table_end :]
        growth[:] = 0
        first = self._starts[1]
        end = first + num_pieces * _PIECE_FIELDS
        sequence, start, stop, *_ = entries[first:end].reshape(-1, _PIECE_FIELDS).T
        grows = (stop > start) & (stop == np.array(rows.committed_lens)[sequence])
        growth[first:end].reshape(-1, _PIECE_FIELDS)[:, _PIECE_END] = grows
        records = num_workers * WORKER_FIELDS
        first_pieces = entries[:records].reshape(-1, WORKER_FIELDS)[:, 0]
        growth[:records].reshape(-1, WORKER_FIELDS)[:, _WORKER_END] = grows[first_pieces]


class PlanSource(Protocol):
    """Gives a kernel the plan of its step and room for its partial results."""

    def device_plan(self, limits: SplitLimits) -> DevicePlan:
        """The step's plan, the same object for every layer."""
        ...

    def partials(self, rows: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """part_out [num_slots, rows, dim] in dtype and part_lse [num_slots, rows] in float32."""
        ...


class StepPlan:
    """PlanSource of one step: cut for its lengths by the first layer's call."""

    def __init__(
        self,
        rows: DecodeRows,
        *,
        head_starts: Sequence[int],
        split_keys: int | None,
        scratch: Scratch,
        device: torch.device,
    ) -> None:
        """split_keys: keys of a piece where results must not depend on the batch, else None."""
        self._rows = rows
        self._head_starts = head_starts
        self._split_keys = split_keys
        self._scratch = scratch
        self._device = device
        self._made: tuple[SplitLimits, DevicePlan] | None = None

    def device_plan(self, limits: SplitLimits) -> DevicePlan:
        """See PlanSource."""
        if self._made is None or self._made[0] != limits:
            plan = split(self._rows, limits, self._split_keys)
            device_plan = DevicePlan(
                plan.bounds,
                batch_size=len(self._rows.committed_lens),
                num_pages=pages_used(self._rows),
                head_starts=self._head_starts,
                device=self._device,
            )
            device_plan.upload(plan, self._rows)
            self._made = limits, device_plan
        return self._made[1]

    def partials(self, rows: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See PlanSource."""
        assert self._made is not None
        shape = (self._made[1].num_slots, rows, dim)
        return take_partials(self._scratch, shape, dtype, self._device)


class ReservedPlan:
    """PlanSource of all steps within static bounds: grid, addresses and strides never change."""

    def __init__(
        self,
        bounds: DecodeBounds,
        limits: SplitLimits,
        *,
        head_starts: Sequence[int],
        split_keys: int | None,
        device: torch.device,
    ) -> None:
        """limits: of the launch shape chosen from `bounds`. Other arguments as in StepPlan."""
        self._limits = limits
        self._split_keys = split_keys
        if split_keys is None:
            self._bounds = balanced_bounds(
                bounds.batch_size,
                bounds.max_rows,
                block_keys=BLOCK_KEYS,
                max_workers=limits.max_workers,
                min_blocks=limits.min_blocks,
            )
        else:
            self._bounds = fixed_bounds(bounds.batch_size, bounds.max_rows, split_keys=split_keys)
        self._plan = DevicePlan(
            self._bounds,
            batch_size=bounds.batch_size,
            num_pages=-(-bounds.max_rows // bounds.page_size),
            head_starts=head_starts,
            device=device,
            max_growth=bounds.max_growth,
        )
        self._partials: tuple[Tensor, Tensor] | None = None

    def reserve_partials(
        self, scratch: Scratch, rows: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Take room for partial results and keep it, also when the scratch outgrows it."""
        shape = (self._bounds.num_slots, rows, dim)
        self._partials = take_partials(scratch, shape, dtype, device)

    def fill(self, rows: DecodeRows) -> None:
        """Write the plan of a step into the buffers."""
        keyless = num_keyless_workers(rows.committed_lens)
        limits = SplitLimits(max(1, self._bounds.num_workers - keyless), self._limits.min_blocks)
        self._plan.upload(split(rows, limits, self._split_keys), rows)

    def grow(self) -> None:
        """See DevicePlan.grow."""
        self._plan.grow()

    def device_plan(self, limits: SplitLimits) -> DevicePlan:
        """See PlanSource. Raises ValueError where the call is not the one that was reserved."""
        if limits != self._limits:
            raise ValueError(
                f"the call needs {limits}, its buffers were reserved for {self._limits}: dtypes, "
                f"widths and strides must be those of decode_buffers"
            )
        return self._plan

    def partials(self, rows: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See PlanSource."""
        assert self._partials is not None
        reserved = self._partials[0]
        if (*reserved.shape[1:], reserved.dtype) != (rows, dim, dtype):
            raise ValueError(
                f"partial results of {rows} rows of {dim} {dtype}; reserved were "
                f"{tuple(reserved.shape[1:])} {reserved.dtype}"
            )
        return self._partials


def split(rows: DecodeRows, limits: SplitLimits, split_keys: int | None) -> SplitPlan:
    """The plan of a step: pieces of split_keys keys, or where that is None equal shares."""
    adds_window = [rows.has_window and not pad for pad in rows.is_padding]
    if split_keys is not None:
        return fixed_plan(rows.committed_lens, adds_window, split_keys=split_keys)
    return balanced_plan(
        rows.committed_lens,
        adds_window,
        block_keys=BLOCK_KEYS,
        max_workers=limits.max_workers,
        min_blocks=limits.min_blocks,
    )


def pages_used(rows: DecodeRows, max_growth: int = 0) -> int:
    """Pages of the sequence that has most, once it has grown."""
    longest = max(rows.committed_lens, default=0)
    return -(-(longest + max_growth) // rows.page_size) if longest else 0


def take_partials(
    scratch: Scratch, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Room for partial results of shape (slots, rows, dim): see PlanSource.partials."""
    # Calls of both dtypes may take turns.
    return (
        scratch.take(f"part_out {dtype}", shape, dtype, device),
        scratch.take("part_lse", shape[:2], torch.float32, device),
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
