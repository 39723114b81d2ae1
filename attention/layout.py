"""The owner rule of decode context parallelism and the shard rule of heads. Torch-free.

Nothing else in the project computes an owner, a local row or a shard boundary, but for the same
rule on the device in backends/triton_rows_kernels.py, which tests compare with this one.
Notation: c = dcp_size, r = dcp_rank, P = page_size, I = interleave, L = global length.
Owner of position p: (p // I) % c. Row of logical slot v on its owner: (v // (c*I)) * I + v % I.
Sources: SGLang (I = 1) and vLLM (any I) agree on both formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, cast

# An int, or an integer array of numpy or torch, for which the rule is applied elementwise.
Integers = TypeVar("Integers")


def shard_range(size: int, part: int, num_parts: int) -> range:
    """Part `part` of `num_parts` of a dimension of `size`: [part*size//n, (part+1)*size//n).

    Uneven sizes work (9 heads over 2 ranks: 4 and 5) and parts may be empty.
    Raises ValueError when part is outside [0, num_parts).
    """
    if not 0 <= part < num_parts:
        raise ValueError(f"part {part} is outside [0, {num_parts})")
    return range(part * size // num_parts, (part + 1) * size // num_parts)


def kv_head_of_query_head(query_head: int, num_q_heads: int, num_kv_heads: int) -> int:
    """Global KV head that the global query head reads: h * Hkv // H."""
    return query_head * num_kv_heads // num_q_heads


@dataclass(frozen=True, slots=True)
class StripeLayout:
    """How one sequence's tokens are striped over the ranks of a DCP group."""

    dcp_size: int
    dcp_rank: int
    page_size: int
    interleave: int = 1

    def __post_init__(self) -> None:
        if self.dcp_size < 1:
            raise ValueError(f"dcp_size {self.dcp_size} must be >= 1")
        if not 0 <= self.dcp_rank < self.dcp_size:
            raise ValueError(f"dcp_rank {self.dcp_rank} is outside [0, {self.dcp_size})")
        if self.page_size < 1:
            raise ValueError(f"page_size {self.page_size} must be >= 1")
        if self.interleave < 1 or self.page_size % self.interleave:
            raise ValueError(
                f"interleave {self.interleave} must be >= 1 and divide page_size {self.page_size}"
            )

    @property
    def logical_page_size(self) -> int:
        """Tokens of a logical page: P * c."""
        return self.page_size * self.dcp_size

    def owner(self, position: Integers) -> Integers:
        """DCP rank that keeps the token at `position` (>= 0), elementwise for an array.

        Drop negative entries (padding) first: -1 modulo c would name the last rank.
        """
        positions: Any = position
        return cast("Integers", positions // self.interleave % self.dcp_size)

    def row(self, logical_slot: Integers) -> Integers:
        """Physical row of `logical_slot` (>= 0) on its owner, elementwise for an array."""
        slots: Any = logical_slot
        span = self.dcp_size * self.interleave
        return cast("Integers", slots // span * self.interleave + slots % self.interleave)

    def local_length(self, length: int) -> int:
        """Tokens of a sequence of global `length` that this rank keeps: n_r(L).

        Not linear: n_r(L - k) != n_r(L) - k, so always call it with the global length.
        """
        span = self.dcp_size * self.interleave
        rest = length % span - self.dcp_rank * self.interleave
        return length // span * self.interleave + min(max(rest, 0), self.interleave)

    def local_count(self, start: int, end: int) -> int:
        """Positions of [start, end) that this rank keeps."""
        return self.local_length(end) - self.local_length(start)

    def position_of_local(self, index: int) -> int:
        """Global position of this rank's `index`-th token (0-based)."""
        block, offset = divmod(index, self.interleave)
        return (block * self.dcp_size + self.dcp_rank) * self.interleave + offset

    def max_local_length(self, max_length: int) -> int:
        """Static bound for launches and graphs: max(1, n_0(max_length)), the same on every rank."""
        span = self.dcp_size * self.interleave
        return max(
            1, max_length // span * self.interleave + min(max_length % span, self.interleave)
        )


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Which heads one rank of a worker computes, all ids global.

    A DCP group is `dcp_size` consecutive tp ranks; its query heads are the union of its ranks',
    its KV heads are those that its query heads read.
    """

    num_q_heads: int
    num_kv_heads: int
    tp_size: int
    tp_rank: int
    dcp_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_kv_heads <= self.num_q_heads:
            raise ValueError(
                f"num_kv_heads {self.num_kv_heads} is outside [1, num_q_heads {self.num_q_heads}]"
            )
        if self.tp_size < 1 or self.dcp_size < 1 or self.tp_size % self.dcp_size:
            raise ValueError(f"dcp_size {self.dcp_size} must divide tp_size {self.tp_size}")
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(f"tp_rank {self.tp_rank} is outside [0, {self.tp_size})")

    @property
    def num_groups(self) -> int:
        """Distinct head shards: tp_size / dcp_size."""
        return self.tp_size // self.dcp_size

    @property
    def group(self) -> int:
        """This rank's DCP group."""
        return self.tp_rank // self.dcp_size

    @property
    def dcp_rank(self) -> int:
        """Rank inside the DCP group."""
        return self.tp_rank % self.dcp_size

    @property
    def local_q_heads(self) -> range:
        """Query heads of this rank; may be empty."""
        return shard_range(self.num_q_heads, self.tp_rank, self.tp_size)

    @property
    def group_q_heads(self) -> range:
        """Query heads of the DCP group."""
        return shard_range(self.num_q_heads, self.group, self.num_groups)

    @property
    def group_head_splits(self) -> tuple[int, ...]:
        """Number of query heads of each rank of the group, in DCP rank order."""
        first = self.group * self.dcp_size
        return tuple(
            len(shard_range(self.num_q_heads, first + r, self.tp_size))
            for r in range(self.dcp_size)
        )

    @property
    def local_heads_in_group(self) -> range:
        """This rank's query heads as indices into the group's."""
        start = self.local_q_heads.start - self.group_q_heads.start
        return range(start, start + len(self.local_q_heads))

    @property
    def group_kv_heads(self) -> range:
        """KV heads that the group's query heads read; every rank of the group stores them all."""
        heads = self.group_q_heads
        if not heads:
            return range(0)
        return range(
            kv_head_of_query_head(heads.start, self.num_q_heads, self.num_kv_heads),
            kv_head_of_query_head(heads.stop - 1, self.num_q_heads, self.num_kv_heads) + 1,
        )

    @property
    def kv_index_of_group_q_head(self) -> tuple[int, ...]:
        """For each query head of the group, the index of its KV head in `group_kv_heads`."""
        first = self.group_kv_heads.start
        return tuple(
            kv_head_of_query_head(h, self.num_q_heads, self.num_kv_heads) - first
            for h in self.group_q_heads
        )
