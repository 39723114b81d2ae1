"""Cuts a step's extend attention into pieces of work: tiles of rows by ranges of their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

NO_SLOT = -1

# Blocks of keys that starting a piece and merging its result are worth.
_PIECE_BLOCKS = 3
# From so many rounds of programs on, tiles are not cut: the last round is small against them.
_MANY_ROUNDS = 6
# Programs that share keys and run together, in rounds: heads are taken together until then.
_ROUNDS_TOGETHER = 8


class Piece(NamedTuple):
    """A tile of rows over prefix_len keys of its sequence's prefix and, if adds_chunk, its chunk.

    token: first token of the sequence's chunk in the step; first_row: of the tile in its sequence
    and KV head; prefix_start: row of its first key in the launch's prefixes. slot_in: the partial
    result that it continues, slot_out: where it leaves its own; NO_SLOT for none and for the result
    itself.
    """

    token: int
    chunk_len: int
    first_row: int
    prefix_start: int
    prefix_len: int
    adds_chunk: int
    slot_in: int
    slot_out: int


class Merge(NamedTuple):
    """Partial results [first_slot, end_slot) of a tile, to be merged."""

    token: int
    chunk_len: int
    first_row: int
    first_slot: int
    end_slot: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Pieces that read rows `prefix` of the step's concatenated prefixes; the longest first."""

    prefix: slice
    pieces: tuple[Piece, ...]

    @property
    def carries(self) -> bool:
        """Whether a piece continues a partial result of the launches before."""
        return any(piece.slot_in != NO_SLOT for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class ExtendSchedule:
    """Launches in order, then merges. No launches only where no sequence has a chunk."""

    launches: tuple[Launch, ...]
    merges: tuple[Merge, ...]
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """group: rows of a query; block_rows: rows of a tile; block_keys: keys of a step of the kernel;
    num_kv_heads: programs of each piece."""

    group: int
    block_rows: int
    block_keys: int
    num_kv_heads: int

    def blocks(self, num_keys: int) -> int:
        """Steps over so many keys."""
        return -(-num_keys // self.block_keys)


@dataclass(frozen=True, slots=True)
class _Range:
    """Keys [start, end) of a sequence's prefix; `row` is the place of `start` in all prefixes."""

    sequence: int
    row: int
    start: int
    end: int
    is_last: bool


@dataclass(slots=True)
class _Tile:
    """A tile of rows in one launch, cut into num_pieces."""

    sequence: int
    first_row: int
    prefix: _Range
    blocks: int
    chunk_blocks: int
    num_pieces: int = 1


def extend_schedule(
    prefix_lens: Sequence[int],
    chunk_lens: Sequence[int],
    *,
    shape: TileShape,
    max_programs: int,
    max_prefix: int | None = None,
) -> ExtendSchedule:
    """Work of one step, in as many launches as max_prefix asks for.

    max_programs: programs that run at once; prefixes are cut where fewer tiles than a few times
    that would leave some idle. 0: a tile is never cut, so that the result of a sequence does not
    depend on the others. max_prefix: most prefix rows of a launch, a multiple of block_keys.
    """
    launches = [
        _tiles(ranges, chunk_lens, shape)
        for ranges in _prefix_ranges(prefix_lens, chunk_lens, max_prefix)
    ]
    for tiles in launches:
        _cut(tiles, shape.num_kv_heads, max_programs)
    return _Assembly(chunk_lens, launches).schedule(shape)


def heads_together(num_pieces: int, num_kv_heads: int, max_programs: int) -> int:
    """Fewest KV heads, a divisor of their number, whose programs fill the GPU for some rounds."""
    for heads in range(1, num_kv_heads):
        is_enough = num_pieces * heads >= _ROUNDS_TOGETHER * max_programs
        if num_kv_heads % heads == 0 and is_enough:
            return heads
    return num_kv_heads


def _prefix_ranges(
    prefix_lens: Sequence[int], chunk_lens: Sequence[int], max_prefix: int | None
) -> list[list[_Range]]:
    """For each launch, consecutive ranges of prefixes. A sequence's cuts depend on it alone."""
    launches: list[list[_Range]] = []
    rows = list(accumulate(prefix_lens, initial=0))
    for sequence, (length, chunk) in enumerate(zip(prefix_lens, chunk_lens, strict=True)):
        if not chunk:
            continue
        step = max_prefix or max(1, length)
        for start in range(0, max(1, length), step):
            end = min(length, start + step)
            row = rows[sequence] + start
            if not (launches and _fits(launches[-1], row, end - start, max_prefix)):
                launches.append([])
            launches[-1].append(_Range(sequence, row, start, end, end == length))
    return launches


def _fits(launch: list[_Range], row: int, length: int, max_prefix: int | None) -> bool:
    """Whether a range may be added to a launch, whose rows are one run of limited length."""
    if max_prefix is None:
        return True
    first, last = launch[0], launch[-1]
    is_next = row == last.row + last.end - last.start
    return is_next and row + length - first.row <= max_prefix


def _tiles(ranges: list[_Range], chunk_lens: Sequence[int], shape: TileShape) -> list[_Tile]:
    tiles = []
    for part in ranges:
        num_rows = chunk_lens[part.sequence] * shape.group
        blocks = shape.blocks(part.end - part.start)
        for first_row in range(0, num_rows, shape.block_rows):
            last_row = min(num_rows, first_row + shape.block_rows) - 1
            own = shape.blocks(last_row // shape.group + 1) if part.is_last else 0
            tiles.append(_Tile(part.sequence, first_row, part, blocks, own))
    return tiles


def _cut(tiles: list[_Tile], num_kv_heads: int, max_programs: int) -> None:
    """Choose num_pieces of every tile for the least time, as rounds of programs predict it."""
    most = _MANY_ROUNDS * max_programs // (num_kv_heads * len(tiles))
    if most < 2 or not any(tile.blocks for tile in tiles):
        return
    longest = max(tile.blocks + tile.chunk_blocks for tile in tiles)
    best, best_time = [1] * len(tiles), float("inf")
    for share in sorted({-(-longest // n) for n in range(1, most + 1)}, reverse=True):
        counts = [_num_pieces(tile, share) for tile in tiles]
        time = _predicted_time(tiles, counts, num_kv_heads, max_programs)
        if time < best_time:
            best, best_time = counts, time
    for tile, count in zip(tiles, best, strict=True):
        tile.num_pieces = count


def _num_pieces(tile: _Tile, share: int) -> int:
    """Pieces of about `share` blocks. Only the prefix is cut: a piece with the chunk starts at its
    first key, which every row sees."""
    total = tile.blocks + tile.chunk_blocks
    count = min(-(-total // share), max(1, tile.blocks))
    return max(1, min(count, total // max(1, tile.chunk_blocks)))


def _predicted_time(
    tiles: list[_Tile], counts: list[int], num_kv_heads: int, max_programs: int
) -> float:
    """Blocks that one program after the other has to do."""
    num_programs = sum(counts) * num_kv_heads
    work = sum(tile.blocks + tile.chunk_blocks for tile in tiles) * num_kv_heads
    mean = work / num_programs + _PIECE_BLOCKS
    largest = max((t.blocks + t.chunk_blocks) / n for t, n in zip(tiles, counts, strict=True))
    return max(-(-num_programs // max_programs) * mean, largest + _PIECE_BLOCKS)


class _Assembly:
    """Gives tiles their slots, launch by launch."""

    def __init__(self, chunk_lens: Sequence[int], launches: list[list[_Tile]]) -> None:
        self._chunk_lens = chunk_lens
        self._tokens = list(accumulate(chunk_lens, initial=0))
        self._launches = launches
        self._most: dict[tuple[int, int], int] = {}
        self._is_partial: set[tuple[int, int]] = set()
        for tiles in launches:
            for tile in tiles:
                key = (tile.sequence, tile.first_row)
                if key in self._most or tile.num_pieces > 1:
                    self._is_partial.add(key)
                self._most[key] = max(self._most.get(key, 1), tile.num_pieces)
        self._first_slot: dict[tuple[int, int], int] = {}
        self._num_slots = 0
        for key in self._most:
            if key in self._is_partial:
                self._first_slot[key] = self._num_slots
                self._num_slots += self._most[key]
        self._written: dict[tuple[int, int], int] = {}

    def schedule(self, shape: TileShape) -> ExtendSchedule:
        """The result."""
        launches = []
        for tiles in self._launches:
            first, last = tiles[0].prefix, tiles[-1].prefix
            rows = slice(first.row, last.row + last.end - last.start)
            pieces = [piece for tile in tiles for piece in self._pieces(tile, rows.start, shape)]
            pieces.sort(key=lambda piece: (_cost(piece, shape), piece.first_row), reverse=True)
            launches.append(Launch(rows, tuple(pieces)))
        merges = tuple(
            Merge(*self._place(key), self._first_slot[key], self._first_slot[key] + count)
            for key, count in self._most.items()
            if count > 1
        )
        return ExtendSchedule(tuple(launches), merges, self._num_slots)

    def _place(self, key: tuple[int, int]) -> tuple[int, int, int]:
        sequence, first_row = key
        return self._tokens[sequence], self._chunk_lens[sequence], first_row

    def _pieces(self, tile: _Tile, launch_row: int, shape: TileShape) -> list[Piece]:
        """The tile's pieces: equal shares of its blocks, the chunk's being the last ones."""
        key = (tile.sequence, tile.first_row)
        place, row = self._place(key), tile.prefix.row - launch_row
        length, count = tile.prefix.end - tile.prefix.start, tile.num_pieces
        total = tile.blocks + tile.chunk_blocks
        starts = (i * total // count * shape.block_keys for i in range(count))
        cuts = [*(min(start, length) for start in starts), length]
        written, first_slot = self._written.get(key, 0), self._first_slot.get(key, NO_SLOT)
        is_result = tile.prefix.is_last and self._most[key] == 1
        pieces = []
        for i in range(count):
            slot = first_slot + i
            pieces.append(
                Piece(
                    *place,
                    prefix_start=row + cuts[i],
                    prefix_len=cuts[i + 1] - cuts[i],
                    adds_chunk=int(tile.prefix.is_last and i == count - 1),
                    slot_in=slot if i < written else NO_SLOT,
                    slot_out=NO_SLOT if is_result else slot,
                )
            )
        self._written[key] = max(written, count)
        return pieces


def _cost(piece: Piece, shape: TileShape) -> int:
    """Blocks of keys."""
    last_query = min(piece.chunk_len - 1, (piece.first_row + shape.block_rows - 1) // shape.group)
    own = shape.blocks(last_query + 1) if piece.adds_chunk else 0
    return shape.blocks(piece.prefix_len) + own
