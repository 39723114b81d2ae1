"""Ranks as threads of one process, for tests of code that needs a Group but no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor


class ThreadGroup:
    """attention.interface.Group among threads: every collective is one exchange of tensors."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, box: list[Any]) -> None:
        self.rank = rank
        self.size = size
        self._barrier = barrier
        self._box = box

    def _exchange(self, value: object) -> list[Any]:
        self._box[self.rank] = value
        self._barrier.wait()
        values = list(self._box)
        self._barrier.wait()
        return values

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor.clone()))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        parts = self._exchange(tensor.clone())
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return tensor.copy_(total)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return self.all_reduce(tensor.clone())[self.rank].clone()

    def all_to_all(self, tensor: Tensor, send_splits: list[int], recv_splits: list[int]) -> Tensor:
        pieces = self._exchange(torch.split(tensor.clone(), send_splits))
        received = torch.cat([piece[self.rank] for piece in pieces])
        assert [len(piece[self.rank]) for piece in pieces] == recv_splits
        return received

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return tensor.copy_(self._exchange(tensor.clone())[source])

    def barrier(self) -> None:
        self._exchange(None)


def run_as_threads(size: int, program: Callable[[ThreadGroup], Any]) -> list[Any]:
    """program(group) on every rank; its results in rank order. Its first error is raised."""
    barrier, box = threading.Barrier(size, timeout=60), [None] * size

    def guarded(rank: int) -> Any:
        done = False
        try:
            result = program(ThreadGroup(rank, size, barrier, box))
            done = True
            return result
        finally:
            if not done:
                barrier.abort()

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(size)]
        errors = [e for f in futures if (e := f.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]


@pytest.fixture
def as_threads() -> Callable[[int, Callable[[ThreadGroup], Any]], list[Any]]:
    """`run_as_threads`: a program on every rank of a group of threads."""
    return run_as_threads
