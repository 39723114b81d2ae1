"""Ranks as threads of one process: a `Group` for tests that want to look into every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

_TIMEOUT_S = 60.0
T = TypeVar("T")


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
        items: list[tuple[str, Tensor]] = self.meeting.swap(self.rank, (name, tensor))  # type: ignore[assignment]
        assert {item[0] for item in items} == {name}, "ranks are in different collectives"
        return [item[1] for item in items]

    def _swap_equal(self, name: str, tensor: Tensor, num_bytes_sent: int) -> list[Tensor]:
        tensors = self._swap(name, tensor, num_bytes_sent)
        assert {(t.shape, t.dtype) for t in tensors} == {(tensor.shape, tensor.dtype)}
        return tensors

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See Group."""
        sent = tensor.nbytes * (self.size - 1)
        return torch.stack(self._swap_equal("all_gather", tensor.clone(), sent))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See Group."""
        tensors = self._swap_equal("all_reduce", tensor.clone(), tensor.nbytes * (self.size - 1))
        return tensor.copy_(sum(tensors[1:], tensors[0]))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """See Group."""
        assert tensor.shape[0] == self.size
        sent = tensor.nbytes * (self.size - 1) // self.size
        tensors = self._swap_equal("reduce_scatter", tensor.clone(), sent)
        return sum((t[self.rank] for t in tensors[1:]), tensors[0][self.rank])

    def all_to_all(self, tensor: Tensor, send_splits: list[int], recv_splits: list[int]) -> Tensor:
        """See Group."""
        pieces = torch.split(tensor, send_splits)
        sent = tensor.nbytes - pieces[self.rank].nbytes
        everyone = self._swap("all_to_all", tensor.clone(), sent)
        all_splits: list[list[int]] = self.meeting.swap(self.rank, send_splits)  # type: ignore[assignment]
        received = [torch.split(t, s)[self.rank] for t, s in zip(everyone, all_splits, strict=True)]
        assert [len(piece) for piece in received] == recv_splits
        return torch.cat(received)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """See Group."""
        return tensor.copy_(self._swap_equal("broadcast", tensor.clone(), tensor.nbytes)[source])

    def barrier(self) -> None:
        """See Group."""
        self.meeting.barrier.wait()


def thread_groups(tp_size: int, dcp_size: int) -> list[tuple[ThreadGroup, ThreadGroup]]:
    """(tensor-parallel group, DCP group) of every rank of a worker whose ranks are threads."""
    tp = _Meeting(tp_size)
    dcp = [_Meeting(dcp_size) for _ in range(tp_size // dcp_size)]
    return [
        (
            ThreadGroup(rank, tp_size, tp),
            ThreadGroup(rank % dcp_size, dcp_size, dcp[rank // dcp_size]),
        )
        for rank in range(tp_size)
    ]


def run_threads(groups: list[tuple[ThreadGroup, ThreadGroup]], body: Callable[[int], T]) -> list[T]:
    """body(rank) in a thread a rank; results in rank order. Raises the first rank's own error."""

    def guarded(rank: int) -> T:
        with ExitStack() as stack:
            # Left by an error, the rank frees the others from waiting for it.
            for group in groups[rank]:
                stack.callback(group.meeting.barrier.abort)
            result = body(rank)
            stack.pop_all()
            return result

    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(len(groups))]
    errors = [error for future in futures if (error := future.exception()) is not None]
    own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (own or errors)[0]
    return [future.result() for future in futures]
