"""Ranks as threads, and striped pools in which everything that must not be read is poison."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from torch import Tensor

# Threads of several ranks on few cores make single examples slow now and then.
settings.register_profile("ranks", deadline=None)
settings.load_profile("ranks")

HUGE_PAGE = 2**31 - 1
_TIMEOUT_S = 30.0


class _Meeting:
    """Where the threads of a group hand one another their tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self.slots: list[object] = [None] * size

    def swap(self, rank: int, item: object) -> list[object]:
        self.slots[rank] = item
        self.barrier.wait()
        items = list(self.slots)
        self.barrier.wait()
        return items


@dataclass
class ThreadGroup:
    """A Group among threads. It records its calls and refuses what a real one could not do."""

    rank: int
    size: int
    meeting: _Meeting
    calls: list[tuple[str, int]] = field(default_factory=list)

    def _swap(self, name: str, tensor: Tensor, num_bytes_sent: int) -> list[Tensor]:
        self.calls.append((name, num_bytes_sent))
        assert tensor.is_contiguous()
        items = self.meeting.swap(self.rank, (name, tensor))
        assert {item[0] for item in items} == {name}, "ranks are in different collectives"
        return [item[1] for item in items]

    def _swap_equal(self, name: str, tensor: Tensor, num_bytes_sent: int) -> list[Tensor]:
        tensors = self._swap(name, tensor, num_bytes_sent)
        assert {(t.shape, t.dtype) for t in tensors} == {(tensor.shape, tensor.dtype)}
        return tensors

    def all_gather(self, tensor: Tensor) -> Tensor:
        sent = tensor.nbytes * (self.size - 1)
        return torch.stack(self._swap_equal("all_gather", tensor, sent))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        tensors = self._swap_equal("all_reduce", tensor.clone(), tensor.nbytes * (self.size - 1))
        return tensor.copy_(sum(tensors[1:], tensors[0]))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        assert tensor.shape[0] == self.size
        sent = tensor.nbytes * (self.size - 1) // self.size
        tensors = self._swap_equal("reduce_scatter", tensor, sent)
        return sum((t[self.rank] for t in tensors[1:]), tensors[0][self.rank])

    def all_to_all(self, tensor: Tensor, send_splits: list[int], recv_splits: list[int]) -> Tensor:
        pieces = tensor.split(send_splits)
        sent = tensor.nbytes - pieces[self.rank].nbytes
        everyone = self._swap("all_to_all", tensor, sent)
        all_splits = self.meeting.swap(self.rank, send_splits)
        received = [t.split(s)[self.rank] for t, s in zip(everyone, all_splits, strict=True)]
        assert [len(piece) for piece in received] == recv_splits
        return torch.cat(received)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return tensor.copy_(self._swap_equal("broadcast", tensor.clone(), tensor.nbytes)[source])

    def barrier(self) -> None:
        self.meeting.barrier.wait()


@pytest.fixture(scope="session")
def run_ranks():
    """run_ranks(size, body) runs body(group) once a rank, in threads -> results in rank order."""

    def run(size: int, body: Callable[[ThreadGroup], object]) -> list:
        meeting = _Meeting(size)
        groups = [ThreadGroup(rank, size, meeting) for rank in range(size)]

        def guarded(group: ThreadGroup) -> object:
            try:
                return body(group)
            except BaseException:
                meeting.barrier.abort()
                raise

        with ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(guarded, group) for group in groups]
        errors = [future.exception() for future in futures]
        broken = [e for e in errors if e and not isinstance(e, threading.BrokenBarrierError)]
        if broken or any(errors):
            raise (broken or [e for e in errors if e])[0]
        assert len({tuple(name for name, _ in group.calls) for group in groups}) == 1
        return [future.result() for future in futures]

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
