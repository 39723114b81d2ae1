"""Collectives through torch.distributed, and how its process groups are made; see nccl_group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from kvbraid.address import join_address
from kvbraid.engine.rank_lost import RankLostError
from kvbraid.engine.ranks import RankContext
from kvbraid.engine.shared_memory import check_splits


class TorchGroup:
    """`attention.interface.Group` over a ProcessGroup, gloo's. Used by one thread of each rank.

    Tensors live on the device of the backend. RankLostError when the backend reports a failure.
    gloo has no reduce_scatter and its all_to_all refuses some dtypes and empty pieces.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group
        self._rank = dist.get_rank(process_group)
        self._size = dist.get_world_size(process_group)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self._size

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[size, *tensor.shape], entry r from rank r."""
        gathered = tensor.new_empty((self._size, *tensor.shape))
        if tensor.numel() > 0:
            with failures_as_rank_lost():
                dist.all_gather(
                    [as_bytes(part) for part in gathered.unbind(0)],
                    as_bytes(tensor.contiguous()),
                    group=self._group,
                )
        return gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, written into `tensor` and returned."""
        if tensor.numel() > 0:
            with failures_as_rank_lost():
                dist.all_reduce(tensor, group=self._group)
        return tensor

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """`tensor` is [size, ...]; returns the sum over ranks of entry `rank`."""
        check_entries(tensor, self._size)
        return self.all_reduce(tensor.clone())[self._rank].clone()

    def all_to_all(self, tensor: Tensor, send_splits: list[int], recv_splits: list[int]) -> Tensor:
        """Dim 0 of `tensor` is cut by send_splits, piece r goes to rank r; returns the pieces
        received, concatenated in rank order."""
        check_splits(tensor, send_splits, recv_splits, self._size)
        received = tensor.new_empty((sum(recv_splits), *tensor.shape[1:]))
        with failures_as_rank_lost():
            self._swap_pieces(
                torch.split(tensor.contiguous(), send_splits), torch.split(received, recv_splits)
            )
        return received

    def _swap_pieces(self, sends: tuple[Tensor, ...], receives: tuple[Tensor, ...]) -> None:
        receives[self._rank].copy_(sends[self._rank])
        works = []
        for peer in range(self._size):
            if peer == self._rank:
                continue
            if sends[peer].numel() > 0:
                piece = as_bytes(sends[peer])
                works.append(dist.isend(piece, group=self._group, group_dst=peer))
            if receives[peer].numel() > 0:
                piece = as_bytes(receives[peer])
                works.append(dist.irecv(piece, group=self._group, group_src=peer))
        for work in works:
            assert work is not None
            work.wait()

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """`tensor` of rank `source`, written into every rank's `tensor` and returned."""
        if not 0 <= source < self._size:
            raise ValueError(f"source {source} is outside [0, {self._size})")
        if tensor.numel() > 0:
            with failures_as_rank_lost():
                dist.broadcast(as_bytes(tensor), group=self._group, group_src=source)
        return tensor

    def barrier(self) -> None:
        """Returns once every rank has entered."""
        with failures_as_rank_lost():
            dist.barrier(group=self._group)


def check_entries(tensor: Tensor, size: int) -> None:
    """Raises ValueError unless dim 0 of `tensor` has an entry for each rank."""
    if tensor.shape[:1] != (size,):
        raise ValueError(f"shape {tuple(tensor.shape)} must begin with the size {size}")


def connect(backend: str, context: RankContext, timeout_s: float) -> None:
    """Joins torch.distributed's world unless this process has. backend: "gloo" or "nccl".

    Waits for all ranks; raises RankLostError when they have not come within timeout_s.
    """
    if dist.is_initialized():
        return
    with failures_as_rank_lost():
        dist.init_process_group(
            backend,
            init_method=f"tcp://{join_address(context.master_addr, context.master_port)}",
            rank=context.rank,
            world_size=context.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=torch.device("cuda", context.local_rank) if backend == "nccl" else None,
        )


def new_process_group(
    ranks: list[int], *, backend: str, timeout_s: float
) -> dist.ProcessGroup | None:
    """The group of `ranks`, or None in a rank outside it. Every rank of the world calls this."""
    with failures_as_rank_lost():
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend=backend)
    return group if isinstance(group, dist.ProcessGroup) else None


@contextmanager
def failures_as_rank_lost() -> Iterator[None]:
    """Turns the errors of torch.distributed into RankLostError."""
    try:
        yield
    except RuntimeError as error:  # the class that gloo raises for a lost or late peer
        raise RankLostError(f"torch.distributed failed: {error}") from error


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as uint8 [bytes], without a copy."""
    return tensor.view(-1).view(torch.uint8)
