"""Collectives among the ranks of one host through /dev/shm, for CPU tensors.

Every collective is one round (several for large tensors): write into the own slot, publish a
ticket, wait until every rank has published it, read the slots. There are two banks of slots, used
in turn. A rank that writes bank b for ticket n + 2 has seen everybody publish n + 1, and whoever
published n + 1 has finished reading bank b of ticket n; so one ticket a rank is all the
bookkeeping, and a rank may run ahead by one collective.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kvbraid.engine.rank_lost import RankLostError
from kvbraid.engine.segment import HEADER_BYTES, MAX_RANKS, MemoryFence, map_segment, no_check
from kvbraid.engine.shared_slots import SharedSlots, SlotViews

DEFAULT_SLOT_BYTES = 1 << 20
_SLOT_MULTIPLE = 4096
_LINE_WORDS = 8  # int64 words of a cache line; each rank has one to write in
_DATA_OFFSET = HEADER_BYTES + MAX_RANKS * _LINE_WORDS * 8
_TICKET, _NUM_ROUNDS = 0, 1  # word of a line; the second is followed by its twin of bank 1
_SPINS_BEFORE_SLEEP = 20_000
_SLEEP_S = 0.0002


class SharedMemoryGroup:
    """`attention.interface.Group` over shared memory. Used by one thread of each rank.

    Sums are taken in rank order, in the tensor's dtype, by every rank for itself: bitwise equal.
    A collective raises RankLostError when a peer has not entered it within timeout_s.
    """

    def __init__(
        self,
        name: str,
        *,
        rank: int,
        size: int,
        timeout_s: float = 30.0,
        start_timeout_s: float = 60.0,
        slot_bytes: int = DEFAULT_SLOT_BYTES,
        check: Callable[[], None] = no_check,
    ) -> None:
        """Waits until every rank that gives the same name has come. 2 * size slots are allocated.

        slot_bytes is a multiple of 4096; larger tensors take several rounds. `check` is called
        while waiting and may raise.
        """
        if not 0 <= rank < size <= MAX_RANKS:
            raise ValueError(f"rank {rank} of {size} is outside [0, size) or size > {MAX_RANKS}")
        if slot_bytes < 1 or slot_bytes % _SLOT_MULTIPLE or slot_bytes < size * 64:
            raise ValueError(f"slot_bytes {slot_bytes} must be a multiple of {_SLOT_MULTIPLE}")
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._slot_bytes = slot_bytes
        memory = map_segment(
            name,
            num_bytes=_DATA_OFFSET + 2 * size * slot_bytes,
            rank=rank,
            size=size,
            timeout_s=start_timeout_s,
            check=check,
        )
        with torch.inference_mode(False):
            self._slots = SharedSlots(
                memory, offset=_DATA_OFFSET, rank=rank, size=size, slot_bytes=slot_bytes
            )
        self._words = memoryview(memory)[HEADER_BYTES:_DATA_OFFSET].cast("q")
        self._own_line = rank * _LINE_WORDS
        self._peers = tuple(r for r in range(size) if r != rank)
        self._peer_tickets = tuple(r * _LINE_WORDS + _TICKET for r in self._peers)
        self._ticket = 0
        self._fence = MemoryFence()

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
        if tensor.nbytes <= self._slot_bytes:
            return self._exchange(tensor).stacked.clone(memory_format=torch.contiguous_format)
        gathered = tensor.new_empty((self._size, *tensor.shape))
        columns = self._slot_bytes // tensor.itemsize
        pieces = torch.split(gathered.view(self._size, -1), columns, dim=1)
        for own, piece in zip(torch.split(tensor.view(-1), columns), pieces, strict=True):
            piece.copy_(self._exchange(own).stacked)
        return gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, written into `tensor` and returned."""
        if tensor.nbytes <= self._slot_bytes:
            return _sum_into(self._exchange(tensor).slots, tensor)
        for piece in torch.split(tensor.view(-1), self._slot_bytes // tensor.itemsize):
            _sum_into(self._exchange(piece).slots, piece)
        return tensor

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """`tensor` is [size, ...]; returns the sum over ranks of entry `rank`."""
        if tensor.shape[:1] != (self._size,):
            raise ValueError(f"shape {tuple(tensor.shape)} must begin with the size {self._size}")
        total = tensor.new_empty(tensor.shape[1:])
        if tensor.nbytes <= self._slot_bytes:
            return _sum_into(self._exchange(tensor).parts, total)
        columns = self._slot_bytes // self._size // tensor.itemsize
        pieces = torch.split(tensor.view(self._size, -1), columns, dim=1)
        for own, piece in zip(pieces, torch.split(total.view(-1), columns), strict=True):
            _sum_into(self._exchange(own).parts, piece)
        return total

    def all_to_all(self, tensor: Tensor, send_splits: list[int], recv_splits: list[int]) -> Tensor:
        """Dim 0 of `tensor` (contiguous) is cut by send_splits, piece r goes to rank r; returns the
        pieces received, concatenated in rank order."""
        check_splits(tensor, send_splits, recv_splits, self._size)
        received = tensor.new_empty((sum(recv_splits), *tensor.shape[1:]))
        sends, receives = torch.split(tensor, send_splits), torch.split(received, recv_splits)
        receives[self._rank].copy_(sends[self._rank])
        largest = max(piece.nbytes for piece in (*sends, *receives))
        if largest > self._slots.mailbox_bytes:
            self._swap_large(sends, receives)
            return received
        mail = self._slots.mailboxes(self._ticket + 1 & 1, tensor, send_splits, recv_splits)
        for peer in self._peers:
            mail.outgoing[peer].copy_(sends[peer])
        num_rounds = self._meet_for(1)
        for peer in self._peers:
            receives[peer].copy_(mail.incoming[peer])
        for _ in range(1, num_rounds):
            self._meet()
        return received

    def _swap_large(self, sends: tuple[Tensor, ...], receives: tuple[Tensor, ...]) -> None:
        outgoing, incoming = [_as_bytes(s) for s in sends], [_as_bytes(r) for r in receives]
        step = self._slots.mailbox_bytes
        num_rounds = max(1, *(-(-piece.numel() // step) for piece in outgoing))
        done = 0
        while done < num_rounds:
            bank, part = self._ticket + 1 & 1, slice(done * step, (done + 1) * step)
            for peer in self._peers:
                piece = outgoing[peer][part]
                self._slots.box(bank, self._rank, peer)[: piece.numel()].copy_(piece)
            if done == 0:
                num_rounds = self._meet_for(num_rounds)
            else:
                self._meet()
            for peer in self._peers:
                piece = incoming[peer][part]
                piece.copy_(self._slots.box(bank, peer, self._rank)[: piece.numel()])
            done += 1

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """`tensor` of rank `source`, written into every rank's `tensor` and returned."""
        if not 0 <= source < self._size:
            raise ValueError(f"source {source} is outside [0, {self._size})")
        whole = (
            (tensor,)
            if tensor.nbytes <= self._slot_bytes
            else torch.split(tensor.view(-1), self._slot_bytes // tensor.itemsize)
        )
        for piece in whole:
            views = self._slots.views(self._ticket + 1 & 1, piece)
            if self._rank == source:
                views.own.copy_(piece)
            self._meet()
            if self._rank != source:
                piece.copy_(views.slots[source])
        return tensor

    def barrier(self) -> None:
        """Returns once every rank has entered."""
        self._meet()

    def _exchange(self, tensor: Tensor) -> SlotViews:
        views = self._slots.views(self._ticket + 1 & 1, tensor)
        views.own.copy_(tensor)
        self._meet()
        return views

    def _meet_for(self, num_rounds: int) -> int:
        """The first of several meetings; the largest num_rounds says how many there will be."""
        word = _NUM_ROUNDS + (self._ticket + 1 & 1)
        self._words[self._own_line + word] = num_rounds
        self._meet()
        return max(self._words[r * _LINE_WORDS + word] for r in range(self._size))

    def _meet(self) -> None:
        """Publishes what this rank has written and waits for every rank's next ticket."""
        words = self._words
        self._ticket = ticket = self._ticket + 1
        self._fence()
        words[self._own_line] = ticket
        for index in self._peer_tickets:
            if words[index] < ticket:
                self._wait(index, ticket)
        self._fence()

    def _wait(self, index: int, ticket: int) -> None:
        words = self._words
        for _ in range(_SPINS_BEFORE_SLEEP):
            os.sched_yield()  # also gives the interpreter lock to the other threads
            if words[index] >= ticket:
                return
        deadline = time.monotonic() + self._timeout_s
        while words[index] < ticket:
            if time.monotonic() > deadline:
                raise RankLostError(
                    f"rank {index // _LINE_WORDS} of {self._size} did not enter collective "
                    f"{ticket} within {self._timeout_s} s"
                )
            time.sleep(_SLEEP_S)


def check_splits(tensor: Tensor, send_splits: list[int], recv_splits: list[int], size: int) -> None:
    """Raises ValueError unless there is one split a rank and send_splits cover dim 0."""
    if len(send_splits) != size or len(recv_splits) != size:
        raise ValueError(f"splits {send_splits} and {recv_splits} must have {size} entries each")
    if min(*send_splits, *recv_splits) < 0 or sum(send_splits) != tensor.shape[0]:
        raise ValueError(f"send_splits {send_splits} must be >= 0 and sum to {tensor.shape[0]}")


def _sum_into(slots: tuple[Tensor, ...], total: Tensor) -> Tensor:
    if len(slots) == 1:
        return total.copy_(slots[0])
    torch.add(slots[0], slots[1], out=total)
    for slot in slots[2:]:
        total.add_(slot)
    return total


def _as_bytes(piece: Tensor) -> Tensor:
    return piece.view(-1).view(torch.uint8)
