"""Which rank sends which rows to which rank: pure, for any sharding on either side.

A row is canonical: (layer, position, global KV head). Page sizes never enter; every destination
rank receives each row of its stripe and heads exactly once, from one source that stores it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbraid.kv.kv_layout import KvLayout, check_compatible, ranks_heads
from kvbraid.kv.slots import owners_of
from kvbraid.kv.source_balance import WorkItem, balance

__all__ = ["KvLayout", "RowRun", "plan_handoff", "ranks_heads"]


@dataclass(frozen=True, slots=True, eq=False)
class RowRun:
    """Rows that one source rank sends to one destination rank, in every layer.

    heads: global KV heads. positions: int32 [n], ascending, n >= 1.
    """

    src_rank: int
    dst_rank: int
    heads: range
    positions: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class _Need:
    dst_rank: int
    heads: range
    positions: NDArray[np.int32]
    candidates: tuple[int, ...]


def plan_handoff(src: KvLayout, dst: KvLayout, start: int, end: int) -> list[RowRun]:
    """Runs that move positions [start, end) from the ranks of `src` to the ranks of `dst`.

    start: rows before it are held by the destination already. Where several source ranks store
    a row, the load is shared: source bytes are as even as the layouts allow. Runs are ordered
    by source, destination and head. Raises IncompatibleError when the rows themselves differ
    and ValueError unless 0 <= start <= end.
    """
    check_compatible(src, dst)
    if not 0 <= start <= end:
        raise ValueError(f"start {start} and end {end} must satisfy 0 <= start <= end")
    needs = list(_needs(src, dst, start, end))
    items = [WorkItem(len(n.positions), len(n.heads), n.candidates) for n in needs]
    runs = [
        RowRun(rank, need.dst_rank, need.heads, positions)
        for need, counts in zip(needs, balance(items, src.tp_size), strict=True)
        for rank, positions in zip(need.candidates, _deal(need.positions, counts), strict=True)
        if len(positions)
    ]
    return sorted(runs, key=lambda run: (run.src_rank, run.dst_rank, run.heads.start))


def _needs(src: KvLayout, dst: KvLayout, start: int, end: int) -> Iterator[_Need]:
    parts = _by_owners(src, dst, start, end)
    for dst_rank in range(dst.tp_size):
        for heads, groups in _head_runs(src, ranks_heads(dst, dst_rank)):
            for src_owner in range(src.dcp_size):
                positions = parts[src_owner * dst.dcp_size + dst_rank % dst.dcp_size]
                if len(positions):
                    ranks = tuple(group * src.dcp_size + src_owner for group in groups)
                    yield _Need(dst_rank, heads, positions, ranks)


def _by_owners(src: KvLayout, dst: KvLayout, start: int, end: int) -> list[NDArray[np.int32]]:
    """Positions by (owner at the source, owner at the destination), source-major."""
    positions = np.arange(start, end, dtype=np.int32)
    pairs = owners_of(src.stripe(0), positions) * dst.dcp_size + owners_of(dst.stripe(0), positions)
    num_pairs = src.dcp_size * dst.dcp_size
    order = np.argsort(pairs.astype(np.uint16), kind="stable")
    ends = np.cumsum(np.bincount(pairs, minlength=num_pairs))
    return np.split(positions[order], ends[:-1])


def _head_runs(src: KvLayout, heads: range) -> Iterator[tuple[range, tuple[int, ...]]]:
    """`heads` cut where the set of source groups that store them changes."""
    stored = [ranks_heads(src, first) for first in range(0, src.tp_size, src.dcp_size)]
    start = heads.start
    for head in heads:
        here, following = (
            tuple(g for g, group_heads in enumerate(stored) if h in group_heads)
            for h in (head, head + 1)
        )
        if head + 1 == heads.stop or here != following:
            yield range(start, head + 1), here
            start = head + 1


def _deal(positions: NDArray[np.int32], counts: NDArray[np.int64]) -> list[NDArray[np.int32]]:
    """`positions` in len(counts) parts of those sizes, each spread evenly over the whole range,
    so that every source has work from the first computed chunk on."""
    if len(counts) == 1:
        return [positions]
    due = np.concatenate([(np.arange(n) + 0.5) / n for n in counts])
    part = np.repeat(np.arange(len(counts)), counts)[np.argsort(due, kind="stable")]
    return [positions[part == i] for i in range(len(counts))]
