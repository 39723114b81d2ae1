"""Collectives of NCCL: each is one call on whole tensors, so that it can be captured in a graph."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from attention.exchanges.base import SymmetricWords
from kvbraid.engine.shared_memory import check_splits
from kvbraid.engine.torch_group import (
    TorchGroup,
    as_bytes,
    check_entries,
    failures_as_rank_lost,
)


class NcclGroup(TorchGroup):
    """`attention.interface.Group` between GPUs. Nothing here waits for the GPU on the host, and
    memory comes from the caching allocator only, so that every collective can be captured."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[size, *tensor.shape], entry r from rank r."""
        gathered = tensor.new_empty((self._size, *tensor.shape))
        if tensor.numel() > 0:
            with failures_as_rank_lost():
                dist.all_gather_into_tensor(
                    as_bytes(gathered), as_bytes(tensor.contiguous()), group=self._group
                )
        return gathered

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """`tensor` is [size, ...]; returns the sum over ranks of entry `rank`."""
        check_entries(tensor, self._size)
        total = tensor.new_empty(tensor.shape[1:])
        if total.numel() > 0:
            with failures_as_rank_lost():
                dist.reduce_scatter_tensor(
                    total.view(-1), tensor.contiguous().view(-1), group=self._group
                )
        return total

    def all_to_all(self, tensor: Tensor, send_splits: list[int], recv_splits: list[int]) -> Tensor:
        """Dim 0 of `tensor` is cut by send_splits, piece r goes to rank r; returns the pieces
        received, concatenated in rank order."""
        check_splits(tensor, send_splits, recv_splits, self._size)
        received = tensor.new_empty((sum(recv_splits), *tensor.shape[1:]))
        with failures_as_rank_lost():
            dist.all_to_all_single(
                received, tensor.contiguous(), recv_splits, send_splits, group=self._group
            )
        return received


class OneHostNcclGroup(NcclGroup):
    """A NcclGroup whose GPUs are in one host: its ranks can map one another's memory.

    That is an `attention.exchanges.base.SymmetricGroup`. Multicast is not used.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        # A mapping lives as long as its handle.
        self._handles: list[object] = []

    def symmetric_words(self, num_words: int, device: torch.device) -> SymmetricWords:
        """int64 words on this rank's GPU, 0 at first, that every rank can write.

        A collective, equal num_words on every rank. Raises RankLostError where the GPUs cannot
        reach one another.
        """
        # The rendezvous is of the current device, which is each thread's own.
        with torch.cuda.device(device):
            current = torch.device("cuda", torch.cuda.current_device())
            return self._symmetric_words(num_words, current)

    def _symmetric_words(self, num_words: int, device: torch.device) -> SymmetricWords:
        # The allocator behind symm_mem.empty. Called so, the words are an allocation of their
        # own, not a part of a pool's block.
        from torch._C._distributed_c10d import _SymmetricMemory

        with failures_as_rank_lost():
            words = _SymmetricMemory.empty_strided_p2p((num_words,), (1,), torch.int64, device)
            handle = _SymmetricMemory.rendezvous(words, self._group.group_name)
            words.zero_()
            torch.cuda.synchronize(device)
            # No rank may write before the slowest has cleared its words.
            self.barrier()
            torch.cuda.synchronize(device)
            addresses = [
                handle.get_buffer(rank, (num_words,), torch.int64).data_ptr()
                for rank in range(self._size)
            ]
        self._handles.append(handle)
        return SymmetricWords(words, torch.tensor(addresses, dtype=torch.int64).to(device))
