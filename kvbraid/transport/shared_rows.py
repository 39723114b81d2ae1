"""Rows in memory that a decode worker shares with a draft service of its host.

The memory is a memfd that the worker makes and hands over with the socket: it has no name, and goes
when the last of both is gone, however they end.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbraid.errors import IncompatibleError, InvalidRequestError
from kvbraid.transport.draft_rows import InlineRows, RowFormat, check_num_bytes
from kvbraid.v1 import draft_pb2 as pb

# Through the socket, fewer bytes than these cost less than they do in memory of their own.
_MIN_SHARED_BYTES = 16 << 10
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class RowMemory:
    """`num_bytes` of a memfd, mapped. Closes `fd`; the mapping goes with the object."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Raises IncompatibleError for a file of another size or without seals, which could
        shrink under its reader: it comes from a peer."""
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise IncompatibleError("the memory for rows may be resized")
            if os.fstat(fd).st_size != num_bytes:
                raise IncompatibleError(f"the memory for rows is not of {num_bytes} bytes")
            self._mapping = mmap.mmap(fd, num_bytes)
        except OSError as error:
            raise IncompatibleError(f"the memory for rows cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        self.num_bytes = num_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))


def new_row_memory(num_bytes: int) -> int:
    """Descriptor of memory that a `RowMemory` takes."""
    fd = os.memfd_create("kvbraid-draft-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def memory_bytes(row_format: RowFormat, max_rows: int) -> int:
    """Bytes of the memory for messages of up to `max_rows` rows."""
    return row_format.row_bytes * max_rows


class SharedRows:
    """RowCarrier that puts many rows into `memory`, which one message at a time may use, and few
    into the message."""

    def __init__(self, row_format: RowFormat, memory: RowMemory) -> None:
        self._format = row_format
        self._memory = memory
        self._inline = InlineRows(row_format)

    def pack(self, rows: Sequence[Tensor], into: pb.DraftRows) -> None:
        """See RowCarrier."""
        num_bytes = sum(part.shape[0] for part in rows) * self._format.row_bytes
        if not _MIN_SHARED_BYTES <= num_bytes <= self._memory.num_bytes:
            self._inline.pack(rows, into)
            return
        address = self._memory.address
        for part in rows:
            raw = part.to(device="cpu", dtype=self._format.dtype).contiguous()
            ctypes.memmove(address, raw.data_ptr(), raw.nbytes)
            address += raw.nbytes
        into.shared_bytes = num_bytes

    def unpack(self, message: pb.DraftRows, num_rows: int) -> Tensor:
        """See RowCarrier. A copy, also because the peer can write the memory while it is read."""
        if message.WhichOneof("carrier") != "shared_bytes":
            return self._inline.unpack(message, num_rows)
        num_bytes = message.shared_bytes
        check_num_bytes(num_bytes, num_rows, self._format)
        if num_bytes > self._memory.num_bytes:
            raise InvalidRequestError(
                f"{num_bytes} bytes of shared rows, accepted: up to {self._memory.num_bytes}",
                field="rows",
            )
        rows = torch.empty((num_rows, self._format.hidden_size), dtype=self._format.dtype)
        ctypes.memmove(rows.data_ptr(), self._memory.address, num_bytes)
        return rows
