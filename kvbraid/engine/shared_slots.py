"""The slots of a shared-memory group as tensors: two banks of one slot a rank.

Views are made once a shape and kept, because making one costs as much as a small collective.
"""

from __future__ import annotations

import math
import mmap
from typing import NamedTuple

import torch
from torch import Tensor

_MAX_CACHED_SHAPES = 512
_ALIGNMENT = 64

_ShapeKey = tuple[torch.Size, torch.dtype]
_MailKey = tuple[torch.Size, torch.dtype, tuple[int, ...], tuple[int, ...]]


class SlotViews(NamedTuple):
    """One bank seen as slots of one shape and dtype."""

    own: Tensor  # [*shape]
    slots: tuple[Tensor, ...]  # each [*shape], in rank order
    parts: tuple[Tensor, ...]  # each [*shape[1:]]: entry `rank` of the slots; () if none
    stacked: Tensor  # [size, *shape], strided over the slots


class Mailboxes(NamedTuple):
    """One bank seen as pieces on their way, by peer; the own entry is empty."""

    outgoing: tuple[Tensor, ...]  # each [rows sent, *row shape], in the own slot
    incoming: tuple[Tensor, ...]  # each [rows received, *row shape], in the peer's slot


class SharedSlots:
    """Both banks and the views of them that are in use."""

    def __init__(
        self, memory: mmap.mmap, *, offset: int, rank: int, size: int, slot_bytes: int
    ) -> None:
        self._rank, self._size = rank, size
        self.slot_bytes = slot_bytes
        self.mailbox_bytes = slot_bytes // size // _ALIGNMENT * _ALIGNMENT
        whole = torch.frombuffer(memory, dtype=torch.uint8, offset=offset)
        self._banks = whole.view(2, size, slot_bytes)
        self._views: dict[_ShapeKey, tuple[SlotViews, SlotViews]] = {}
        self._mail: dict[_MailKey, tuple[Mailboxes, Mailboxes]] = {}

    def views(self, bank: int, tensor: Tensor) -> SlotViews:
        """The bank for tensors like this one, of slot_bytes at most."""
        key = (tensor.shape, tensor.dtype)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MAX_CACHED_SHAPES:
                self._views.clear()
            views = self._views[key] = (self._cut(0, *key), self._cut(1, *key))
        return views[bank]

    def mailboxes(
        self, bank: int, tensor: Tensor, send_splits: list[int], recv_splits: list[int]
    ) -> Mailboxes:
        """The bank for the pieces of such an exchange, each of mailbox_bytes at most."""
        key = (tensor.shape[1:], tensor.dtype, tuple(send_splits), tuple(recv_splits))
        mail = self._mail.get(key)
        if mail is None:
            if len(self._mail) >= _MAX_CACHED_SHAPES:
                self._mail.clear()
            mail = self._mail[key] = (self._address(0, *key), self._address(1, *key))
        return mail[bank]

    def box(self, bank: int, source: int, destination: int) -> Tensor:
        """Where `source` puts what `destination` takes: uint8 [mailbox_bytes]."""
        start = destination * self.mailbox_bytes
        return self._banks[bank, source, start : start + self.mailbox_bytes]

    def _cut(self, bank: int, shape: torch.Size, dtype: torch.dtype) -> SlotViews:
        # Views made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            flat = self._banks[bank].view(dtype)[:, : math.prod(shape)]
            stacked = flat.view(self._size, *shape)
            slots = stacked.unbind(0)
            has_parts = shape[:1] == (self._size,)
            parts = tuple(slot[self._rank] for slot in slots) if has_parts else ()
            return SlotViews(slots[self._rank], slots, parts, stacked)

    def _address(
        self,
        bank: int,
        row_shape: torch.Size,
        dtype: torch.dtype,
        send_splits: tuple[int, ...],
        recv_splits: tuple[int, ...],
    ) -> Mailboxes:
        def piece(source: int, destination: int, rows: int) -> Tensor:
            count = 0 if source == destination else rows
            flat = self.box(bank, source, destination).view(dtype)
            return flat[: count * math.prod(row_shape)].view(count, *row_shape)

        with torch.inference_mode(False):
            return Mailboxes(
                tuple(piece(self._rank, peer, rows) for peer, rows in enumerate(send_splits)),
                tuple(piece(peer, self._rank, rows) for peer, rows in enumerate(recv_splits)),
            )
