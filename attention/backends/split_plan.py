"""Cuts the keys of a decode batch into pieces and deals them to the programs of a launch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

# Fields of a piece: sequence, first key, end of its keys, slot of its partial result (-1 where it
# is the sequence's only piece and writes the result itself), whether it adds the window's keys.
Piece = tuple[int, int, int, int, int]

# A worker's record: first piece, end of its pieces, then sequence, first key and end of keys of the
# first piece and the page of its first key, so that a program's first copy waits for one load only.
# The last two are 0.
WORKER_FIELDS = 8

_NO_SLOT = -1
# One piece a worker is faster up to this many workers a sequence, and while the largest share is
# not further above the mean than this.
_MOST_PIECES = 4
_UNEVENNESS = 1.05
# Pieces without keys are quick; this many share a worker of their own.
_KEYLESS_PIECES = 8


@dataclass(frozen=True, slots=True)
class SplitBounds:
    """Most that plans need: programs for a block of rows, pieces, partial results of all sequences
    and of one sequence (0: no sequence is ever in more than one piece)."""

    num_workers: int
    num_pieces: int
    num_slots: int
    max_slots: int


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
    def bounds(self) -> SplitBounds:
        """Exactly what this plan needs."""
        return SplitBounds(self.num_workers, len(self.pieces), self.num_slots, self.max_slots)

    @property
    def num_workers(self) -> int:
        """Programs to launch for each block of rows of a KV head; 0 only without sequences."""
        return len(self.worker_pieces) - 1

    def worker_records(self, page_of: Callable[[int, int], int], page_size: int) -> list[int]:
        """WORKER_FIELDS integers for each worker. page_of(sequence, i): its i-th page."""
        records: list[int] = []
        for first, end in pairwise(self.worker_pieces):
            sequence, start, stop, _, _ = self.pieces[first]
            page = page_of(sequence, start // page_size) if stop > start else 0
            records += (first, end, sequence, start, stop, page, 0, 0)
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
    adds_window: sequences whose last piece has a window to add, which costs about a block more.
    A worker gets at least min_blocks blocks of keys unless there are fewer in all. Where sequences
    are many and no share gets much above the mean by it, a worker gets one piece only, which saves
    partial results and their merge.
    """
    key_blocks = [-(-length // block_keys) for length in lengths]
    blocks = [n and n + int(w) for n, w in zip(key_blocks, adds_window, strict=True)]
    total = sum(blocks)
    num_workers = max(1, min(max_workers, sum(key_blocks) // min_blocks))
    # No more workers than give the same largest share: each costs a partial result.
    num_workers = -(-total // -(-total // num_workers)) if total else 1
    counts = [
        max(1, min(most, round(count * num_workers / max(1, total))))
        for count, most in zip(blocks, key_blocks, strict=True)
    ]
    largest = max((-(-n // k) for n, k in zip(blocks, counts, strict=True)), default=0)
    is_even = largest * num_workers <= total * _UNEVENNESS
    if is_even and sum(counts) <= max_workers and num_workers <= _MOST_PIECES * len(blocks):
        cuts = [
            [*(i * n // k * block_keys for i in range(k)), length]
            for length, n, k in zip(lengths, blocks, counts, strict=True)
        ]
        return _assemble(cuts, list(range(sum(counts))), adds_window)
    return _assemble(
        *_equal_shares(lengths, blocks, key_blocks, block_keys, num_workers), adds_window
    )


def balanced_bounds(
    batch_size: int, max_length: int, *, block_keys: int, max_workers: int, min_blocks: int
) -> SplitBounds:
    """Bounds of `balanced_plan` for batch_size sequences of at most max_length keys, where it is
    given max_workers less `num_keyless_workers`, at least 1."""
    max_blocks = -(-max_length // block_keys)
    useful = max(batch_size, -(-batch_size * max_blocks // min_blocks))
    num_workers = max(min(max_workers, useful), 1 + -(-batch_size // _KEYLESS_PIECES))
    max_slots = min(num_workers, max_blocks)
    if max_slots < 2:
        return SplitBounds(num_workers, num_workers + batch_size, 0, 0)
    # Each of the inner bounds between shares adds a piece, and cuts a sequence in two at most once.
    num_slots = num_workers + min(batch_size, num_workers)
    return SplitBounds(num_workers, num_workers + batch_size, num_slots, max_slots)


def num_keyless_workers(lengths: Sequence[int]) -> int:
    """Workers that a plan spends on sequences without keys."""
    return -(-sum(length == 0 for length in lengths) // _KEYLESS_PIECES)


def _equal_shares(
    lengths: Sequence[int],
    blocks: Sequence[int],
    key_blocks: Sequence[int],
    block_keys: int,
    num_workers: int,
) -> tuple[list[list[int]], list[int]]:
    """Bounds of each sequence's pieces and the worker of each piece: shares equal to a block, or
    to two where a window would else be a share of its own."""
    bounds = list(accumulate(blocks, initial=0))
    ends = [(worker + 1) * bounds[-1] // num_workers for worker in range(num_workers)]
    cuts: list[list[int]] = []
    owners: list[int] = []
    for length, count, (first, stop) in zip(lengths, key_blocks, pairwise(bounds), strict=True):
        worker = min(bisect_right(ends, first), num_workers - 1)
        inner = ends[worker : bisect_left(ends, min(stop, first + count))]
        cuts.append([0, *((end - first) * block_keys for end in inner), length])
        owners.extend(range(worker, worker + len(inner) + 1))
    return cuts, owners


def fixed_plan(
    lengths: Sequence[int], adds_window: Sequence[bool], *, split_keys: int
) -> SplitPlan:
    """Pieces of split_keys keys, whatever else is in the batch, each for a worker of its own.

    The result of a sequence then does not depend on the batch that it is in.
    """
    cuts = [[*range(0, max(length, 1), split_keys), length] for length in lengths]
    num_pieces = sum(len(cut) - 1 for cut in cuts)
    return _assemble(cuts, list(range(num_pieces)), adds_window)


def fixed_bounds(batch_size: int, max_length: int, *, split_keys: int) -> SplitBounds:
    """Bounds of `fixed_plan` for batch_size sequences of at most max_length keys."""
    most = max(1, -(-max_length // split_keys))
    num_pieces = batch_size * most
    if most < 2:
        return SplitBounds(num_pieces, num_pieces, 0, 0)
    return SplitBounds(num_pieces, num_pieces, num_pieces, most)


def _assemble(cuts: list[list[int]], owners: list[int], adds_window: Sequence[bool]) -> SplitPlan:
    """cuts: of each sequence the bounds of its pieces; owners: worker of each piece, in order."""
    shares: list[list[Piece]] = [[] for _ in range(max(owners, default=-1) + 1)]
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
    shares += [keyless[i : i + _KEYLESS_PIECES] for i in range(0, len(keyless), _KEYLESS_PIECES)]
    shares = [share for share in shares if share]
    return SplitPlan(
        pieces=tuple(piece for share in shares for piece in share),
        worker_pieces=tuple(accumulate((len(share) for share in shares), initial=0)),
        slot_starts=tuple(slot_starts),
    )
