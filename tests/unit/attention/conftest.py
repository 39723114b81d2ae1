"""Ranks as threads, and striped pools in which everything that must not be read is poison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tools.thread_ranks import ThreadGroup, run_threads, thread_groups

HUGE_PAGE = 2**31 - 1


@pytest.fixture(scope="session")
def run_ranks():
    """run_ranks(size, body) runs body(group) once a rank, in threads -> results in rank order."""

    def run(size: int, body: Callable[[ThreadGroup], object]) -> list:
        groups = thread_groups(size, 1)
        results = run_threads(groups, lambda rank: body(groups[rank][0]))
        assert len({tuple(name for name, _ in group.calls) for group, _ in groups}) == 1
        return results

    return run


@dataclass
class StripedPools:
    """Each rank's pool rows [N, P, heads, width] of one cache tensor, and the page table."""

    pools: list[Tensor]
    page_table: Tensor


@pytest.fixture(scope="session")
def stripe_rows():
    """Lays dense sequences out as c stripes, token by token, without the project's formulas.

    Every rank keeps its tokens densely in order. Rows that a rank does not own, rows past
    `num_committed` and all of page 0 are NaN; page table entries past a sequence's pages are huge.
    """

    def build(
        tensors: Sequence[Sequence[Tensor]],
        *,
        dcp_size: int,
        page_size: int,
        interleave: int = 1,
        num_committed: Sequence[int] | None = None,
        shuffle_pages: bool = True,
        seed: int = 0,
    ) -> tuple[list[list[Tensor]], Tensor]:
        """tensors: for each cache tensor (key, value) the sequences' rows [L, heads, width]."""
        lengths = [len(rows) for rows in tensors[0]]
        committed = list(num_committed) if num_committed is not None else lengths
        pages_of = [-(-length // (page_size * dcp_size)) for length in lengths]
        num_pages = 1 + sum(pages_of) + 2
        order = torch.arange(1, num_pages)
        if shuffle_pages:
            order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))]
        table = torch.full((len(lengths), max([*pages_of, 1]) + 1), HUGE_PAGE, dtype=torch.int32)
        used = 0
        for i, count in enumerate(pages_of):
            table[i, :count] = order[used : used + count]
            used += count
        pools = [
            [
                torch.full((num_pages, page_size, *rows[0].shape[1:]), float("nan")).to(
                    rows[0].dtype
                )
                for rows in tensors
            ]
            for _ in range(dcp_size)
        ]
        for i in range(len(lengths)):
            kept = [0] * dcp_size
            for position in range(committed[i]):
                rank = position // interleave % dcp_size
                page, offset = divmod(kept[rank], page_size)
                kept[rank] += 1
                for pool, rows in zip(pools[rank], tensors, strict=True):
                    pool[int(table[i, page]), offset] = rows[i][position]
        return pools, table

    return build
