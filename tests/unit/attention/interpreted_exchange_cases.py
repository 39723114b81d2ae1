"""Runs the exchanges' kernels in Triton's interpreter and prints their errors, as JSON.

A program of its own because TRITON_INTERPRET must be set before triton is imported. Ranks share
the process: all push before one waits, and rank 0 is a step ahead of the others all the time.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from attention import reference
from attention.exchanges.base import SymmetricWords
from attention.exchanges.fused import FusedLayout, FusedMemory, launch
from attention.exchanges.pieces import Pieces, TorchPieces, piece_bytes
from attention.exchanges.triton_pieces import TritonPieces
from attention.interface import AttentionResult, SplitResult
from attention.layout import shard_range

NAN = float("nan")
NO_KEYS = float("-inf")
# Words as some step long ago may have left them: NaN, of a step that is not now.
STALE = (-1 << 32) | 0x7FFFFFFF


@dataclass(frozen=True)
class Case:
    size: int
    num_heads: int
    width: int
    dtype: str
    window: int = 1
    most_slots: int = 5
    steps: int = 4
    most_tokens: int = 3

    @property
    def head_splits(self) -> list[int]:
        return [len(shard_range(self.num_heads, rank, self.size)) for rank in range(self.size)]


CASES = (
    Case(2, 4, 64, "float32"),
    Case(2, 5, 24, "float16", window=2),
    Case(3, 7, 7, "float16"),
    Case(3, 2, 16, "float32"),  # rank 0 has no heads
    Case(2, 1, 16, "float32", window=3),
    Case(3, 3, 33, "bfloat16", most_slots=0),
    Case(2, 2, 40, "bfloat16", most_slots=300, steps=2, most_tokens=2),
    # Ranks of one head and of two; and rank by rank one head or none.
    Case(8, 11, 16, "float32", most_slots=2, steps=3, most_tokens=2),
    Case(8, 5, 16, "float16", most_slots=0, steps=2, most_tokens=2),
)


def whole_result(generator: torch.Generator, shape: tuple[int, ...], dtype) -> AttentionResult:
    """Random rows; a third has no keys, and its values are NaN."""
    out = torch.randn(shape, generator=generator).to(dtype)
    lse = 4 * torch.randn(shape[:-1], generator=generator)
    empty = torch.rand(shape[:-1], generator=generator) < 0.3
    return AttentionResult(
        out.masked_fill_(empty[..., None], NAN), lse.masked_fill_(empty, NO_KEYS)
    )


def random_splits(
    case: Case, batch: int, generator: torch.Generator
) -> tuple[SplitResult, list[AttentionResult]]:
    """A rank's splits and, as the same thing, partial results to be merged. What must not be read
    is NaN: out and lse of sequences with slots, values without keys, slots past the last."""
    shape = (batch * case.window, case.num_heads, case.width)
    dtype = getattr(torch, case.dtype)
    out, lse = whole_result(generator, shape, dtype)
    counts = torch.randint(0, case.most_slots + 1, (batch,), generator=generator)
    counts[0] = case.most_slots
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    num_slots = int(starts[-1])
    rows = (case.window, case.num_heads)
    part_out, part_lse = whole_result(generator, (num_slots + 2, *rows, case.width), torch.float32)
    part_out[num_slots:], part_lse[num_slots:] = NAN, NAN
    partials = []
    for i in range(max(1, case.most_slots)):
        piece = AttentionResult(torch.zeros(shape), torch.full(shape[:-1], NO_KEYS))
        for b in range(batch):
            tokens = slice(b * case.window, (b + 1) * case.window)
            if i < counts[b]:
                piece.out[tokens] = part_out[int(starts[b]) + i]
                piece.lse[tokens] = part_lse[int(starts[b]) + i]
            elif i == 0 and counts[b] == 0:
                piece.out[tokens], piece.lse[tokens] = out[tokens].float(), lse[tokens]
        partials.append(piece)
    for b in range(batch):
        if counts[b]:
            tokens = slice(b * case.window, (b + 1) * case.window)
            out[tokens], lse[tokens] = NAN, NAN
    splits = SplitResult(
        out,
        lse,
        part_out.view(num_slots + 2, -1, case.width),
        part_lse.view(num_slots + 2, -1),
        starts.to(torch.int32),
        case.most_slots,
    )
    return splits, partials


def row_error(actual: Tensor, expected: Tensor) -> float:
    """Largest L2 distance of a row, relative to rows of norm 1 or more; NaN counts as infinite."""
    distance = (actual.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1.0)
    return float(distance.nan_to_num(float("inf")).max()) if distance.numel() else 0.0


class FusedRanks:
    """The ranks of a group, each with receive memory."""

    def __init__(self, case: Case) -> None:
        dtype = getattr(torch, case.dtype)
        self.case = case
        layout = FusedLayout(
            case.most_tokens * case.window, case.width, dtype, tuple(case.head_splits)
        )
        owns = [torch.full((layout.num_words,), STALE) for _ in range(case.size)]
        addresses = torch.tensor([own.data_ptr() for own in owns])
        self.memories = [
            FusedMemory.make(layout, SymmetricWords(own, addresses), torch.device("cpu"))
            for own in owns
        ]
        self.programs = self.memories[0].num_programs

    def push(self, rank: int, splits: SplitResult) -> None:
        merged = torch.empty(0, dtype=splits.out.dtype)
        launch(self.memories[rank], splits, merged, rank, range(self.programs))

    def collect(self, rank: int, splits: SplitResult) -> Tensor:
        heads = self.case.head_splits[rank]
        merged = torch.full((splits.out.shape[0], heads, self.case.width), NAN)
        merged = merged.to(splits.out.dtype)
        programs = range(self.programs, 2 * self.programs)
        launch(self.memories[rank], splits, merged, rank, programs)
        return merged


def run_fused(case: Case) -> float:
    generator = torch.Generator().manual_seed(1)
    ranks = FusedRanks(case)
    steps = []
    for _ in range(case.steps):
        batch = int(torch.randint(1, case.most_tokens + 1, (1,), generator=generator))
        steps.append([random_splits(case, batch, generator) for _ in range(case.size)])
    ranks.push(0, steps[0][0][0])
    error = 0.0
    for index, step in enumerate(steps):
        merged: list[Tensor] = [torch.empty(0)] * case.size
        for rank in range(1, case.size):
            ranks.push(rank, step[rank][0])
        merged[0] = ranks.collect(0, step[0][0])
        if index + 1 < len(steps):
            ranks.push(0, steps[index + 1][0][0])
        for rank in range(1, case.size):
            merged[rank] = ranks.collect(rank, step[rank][0])
        expected = reference.merge([part for _, parts in step for part in parts]).out
        error = max(error, row_error(torch.cat(merged, dim=1), expected))
    return error


def run_a2a(case: Case, packs: Pieces, merges: Pieces) -> float:
    """Pieces packed by one implementation and merged by another."""
    generator = torch.Generator().manual_seed(2)
    dtype, splits = getattr(torch, case.dtype), case.head_splits
    shape = (case.most_tokens, case.num_heads, case.width)
    partials = [whole_result(generator, shape, dtype) for _ in range(case.size)]
    sizes = [piece_bytes(case.most_tokens * heads, case.width, dtype) for heads in splits]
    sent = [packs.pack(partial, splits).split(sizes) for partial in partials]
    merged = [
        merges.merge(torch.stack([pieces[rank] for pieces in sent]), partials[rank].out, heads)
        for rank, heads in enumerate(splits)
    ]
    return row_error(torch.cat(merged, dim=1), reference.merge(partials).out)


def run_weigh(case: Case) -> float:
    generator = torch.Generator().manual_seed(3)
    dtype, splits = getattr(torch, case.dtype), case.head_splits
    shape = (case.most_tokens, case.num_heads, case.width)
    partials = [whole_result(generator, shape, dtype) for _ in range(case.size)]
    lses = torch.stack([partial.lse for partial in partials])
    sent = [
        TritonPieces().weigh(partial.out, lses, rank, splits)
        for rank, partial in enumerate(partials)
    ]
    merged = [sum(pieces[rank] for pieces in sent)[:, :heads] for rank, heads in enumerate(splits)]
    padding = [
        float(pieces[rank][:, heads:].abs().sum())
        for pieces in sent
        for rank, heads in enumerate(splits)
    ]
    assert padding == [0.0] * len(padding)
    return row_error(torch.cat(merged, dim=1), reference.merge(partials).out)


def main() -> int:
    torch.set_num_threads(1)
    results = []
    for case in CASES:
        errors = {
            "fused": run_fused(case),
            "a2a pack": run_a2a(case, TritonPieces(), TorchPieces()),
            "a2a merge": run_a2a(case, TorchPieces(), TritonPieces()),
            "ag_rs weigh": run_weigh(case),
        }
        results.append({**asdict(case), "errors": errors})
    json.dump(results, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
