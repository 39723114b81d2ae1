"""Cuts the keys of a decode batch into pieces and deals them to the programs of a launch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

# Fields of a piece: sequence, first key, end of its keys, slot of its partial result (-1 where it
# is the sequence's only piece and writes the result itself), whether it adds the window's keys.
Piece = tuple[int, int, int, int, int]

# A worker's record: first piece, end of its pieces, then sequence, first key, end of keys and slot
# of the first piece and the page of its first key, so that a program starts after one load.
WORKER_FIELDS = 8

_NO_SLOT = -1
# Pieces without keys are quick; this many share a worker of their own.
_KEYLESS_PIECES = 8


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Pieces in the order of the workers that compute them.

    worker_pieces: [workers + 1], worker i computes pieces [worker_pieces[i], worker_pieces[i+1]);
        either all of them have keys or none has.
    slot_starts: [B + 1], the partial results of sequence b are slots [slot_starts[b],
        slot_starts[b + 1]), in key order; none where one piece holds the whole sequence.
    """

    pieces: tuple[Piece, ...]
    worker_pieces: tuple[int, ...]
    slot_starts: tuple[int, ...]

    @property
    def num_workers(self) -> int:
        """Programs to launch for each block of rows of a KV head; 0 only without sequences."""
        return len(self.worker_pieces) - 1

    def worker_records(self, page_table: Sequence[Sequence[int]], page_size: int) -> list[int]:
        """WORKER_FIELDS integers for each worker. page_table: [B, max_pages]."""
        records: list[int] = []
        for first, end in pairwise(self.worker_pieces):
            sequence, start, stop, slot, _ = self.pieces[first]
            page = page_table[sequence][start // page_size] if stop > start else 0
            records += (first, end, sequence, start, stop, slot, page, 0)
        return records

    @property
    def num_slots(self) -> int:
        """Partial results that the pieces write."""
        return self.slot_starts[-1]

    @property
    def max_slots(self) -> int:
        """Most partial results of a sequence; 0 means that there is nothing to merge."""
        return max((b - a for a, b in pairwise(self.slot_starts)), default=0)


def balanced_plan(
    lengths: Sequence[int],
    adds_window: Sequence[bool],
    *,
    block_keys: int,
    max_workers: int,
    min_blocks: int,
) -> SplitPlan:
    """Equal shares of all keys for each worker, so that one long sequence fills the GPU as well
    as many short ones.

    lengths: keys of each sequence in this rank's pool. Pieces start at multiples of block_keys.
    A worker gets at least min_blocks blocks of keys unless there are fewer in all.
    """
    bounds = list(accumulate((-(-length // block_keys) for length in lengths), initial=0))
    total = bounds[-1]
    num_workers = max(1, min(max_workers, total // min_blocks))
    ends = [(worker + 1) * total // num_workers for worker in range(num_workers)]
    cuts: list[list[int]] = []
    owners: list[int] = []
    for length, (first, stop) in zip(lengths, pairwise(bounds), strict=True):
        worker = min(bisect_right(ends, first), num_workers - 1)
        inner = ends[worker : bisect_left(ends, stop)]
        cuts.append([0, *((end - first) * block_keys for end in inner), length])
        owners.extend(range(worker, worker + len(inner) + 1))
    return _assemble(cuts, owners, adds_window, num_workers)


def fixed_plan(
    lengths: Sequence[int], adds_window: Sequence[bool], *, split_keys: int
) -> SplitPlan:
    """Pieces of split_keys keys, whatever else is in the batch, each for a worker of its own.

    The result of a sequence then does not depend on the batch that it is in.
    """
    cuts = [[*range(0, max(length, 1), split_keys), length] for length in lengths]
    num_pieces = sum(len(cut) - 1 for cut in cuts)
    return _assemble(cuts, list(range(num_pieces)), adds_window, num_pieces)


def _assemble(
    cuts: list[list[int]], owners: list[int], adds_window: Sequence[bool], num_workers: int
) -> SplitPlan:
    """cuts: of each sequence the bounds of its pieces; owners: worker of each piece, in order."""
    shares: list[list[Piece]] = [[] for _ in range(num_workers)]
    keyless: list[Piece] = []
    slot_starts = [0]
    remaining = iter(owners)
    for sequence, cut in enumerate(cuts):
        num_pieces = len(cut) - 1
        first_slot = slot_starts[-1] if num_pieces > 1 else _NO_SLOT
        slot_starts.append(slot_starts[-1] + (num_pieces if num_pieces > 1 else 0))
        for i, (start, end) in enumerate(pairwise(cut)):
            window = int(i == num_pieces - 1 and adds_window[sequence])
            slot = first_slot if num_pieces == 1 else first_slot + i
            owner = next(remaining)
            share = shares[owner] if end > start else keyless
            share.append((sequence, start, end, slot, window))
    shares += [
        keyless[i : i + _KEYLESS_PIECES] for i in range(0, len(keyless), _KEYLESS_PIECES)
    ]
    shares = [share for share in shares if share]
    return SplitPlan(
        pieces=tuple(piece for share in shares for piece in share),
        worker_pieces=tuple(accumulate((len(share) for share in shares), initial=0)),
        slot_starts=tuple(slot_starts),
    )

