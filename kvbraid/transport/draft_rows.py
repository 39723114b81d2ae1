"""How fused rows travel between processes; here: as raw bytes in the message, or behind it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvbraid.errors import InvalidRequestError
from kvbraid.v1 import draft_pb2 as pb

# Fewer bytes cost less in their message than beside it.
_MIN_FOLLOWING_BYTES = 32 << 10

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_EXPONENTS = {
    torch.float32: ("int32", 0x7F800000),
    torch.bfloat16: ("int16", 0x7F80),
    torch.float16: ("int16", 0x7C00),
}


class RowFormat:
    """What every row of a connection is: [hidden_size] numbers of `dtype`."""

    def __init__(self, hidden_size: int, row_dtype: str) -> None:
        """row_dtype: one of `draft_grant.ROW_DTYPES`."""
        self.hidden_size = hidden_size
        self.dtype = _DTYPES[row_dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.hidden_size * self.dtype.itemsize


class RowCarrier(Protocol):
    """One end of a way for rows between two processes."""

    def pack(self, rows: Sequence[Tensor], into: pb.DraftRows) -> None:
        """Have the message part `into` carry `rows`, each [m, d] of any device and float type,
        one after the other. Later changes of the tensors do not matter."""
        ...

    def unpack(self, message: pb.DraftRows, num_rows: int) -> Tensor:
        """[num_rows, d] on the CPU, the caller's own. Raises InvalidRequestError when the message
        carries another number of bytes."""
        ...


class InlineRows:
    """RowCarrier that puts the bytes into the message."""

    def __init__(self, row_format: RowFormat) -> None:
        self._format = row_format

    def pack(self, rows: Sequence[Tensor], into: pb.DraftRows) -> None:
        """See RowCarrier."""
        parts = sendable_parts(rows, self._format)
        if parts:
            into.inline = b"".join([_memory_of(part) for part in parts])

    def unpack(self, message: pb.DraftRows, num_rows: int) -> Tensor:
        """See RowCarrier."""
        data = message.inline
        check_num_bytes(len(data), num_rows, self._format)
        return _tensor_of(data, num_rows, self._format)


class FollowingRows:
    """RowCarrier that leaves many rows where they are, to be sent behind their message, and puts
    few into it. For one message at a time.

    to_follow: of the message packed last. followed: what came behind the message that is unpacked.
    """

    def __init__(self, row_format: RowFormat) -> None:
        self._format = row_format
        self._inline = InlineRows(row_format)
        self._parts: list[Tensor] = []
        self.followed = memoryview(b"")

    @property
    def to_follow(self) -> list[memoryview]:
        """The tensors' own memory: to be sent, or copied, while nobody changes them."""
        return [memoryview(_memory_of(part)) for part in self._parts]

    def pack(self, rows: Sequence[Tensor], into: pb.DraftRows) -> None:
        """See RowCarrier; but for `to_follow`."""
        self._parts = []
        num_bytes = sum(part.shape[0] for part in rows) * self._format.row_bytes
        if num_bytes < _MIN_FOLLOWING_BYTES:
            self._inline.pack(rows, into)
            return
        self._parts = sendable_parts(rows, self._format)
        into.following_bytes = num_bytes

    def unpack(self, message: pb.DraftRows, num_rows: int) -> Tensor:
        """See RowCarrier."""
        if message.WhichOneof("carrier") != "following_bytes":
            return self._inline.unpack(message, num_rows)
        check_num_bytes(len(self.followed), num_rows, self._format)
        return _tensor_of(self.followed, num_rows, self._format)


def sendable_parts(rows: Sequence[Tensor], row_format: RowFormat) -> list[Tensor]:
    """Those of `rows` that are not empty, as contiguous tensors of `row_format` on the CPU."""
    parts = [part for part in rows if part.shape[0]]
    return [
        part.to(device="cpu", dtype=row_format.dtype).contiguous()
        if part.dtype != row_format.dtype or part.device.type != "cpu" or not part.is_contiguous()
        else part
        for part in parts
    ]


def _memory_of(part: Tensor) -> ctypes.Array[ctypes.c_char]:
    """Its bytes, without torch: a small step would spend more on views than on the wire. They are
    there as long as the tensor is."""
    return (ctypes.c_char * part.nbytes).from_address(part.data_ptr())


def _tensor_of(data: bytes | memoryview, num_rows: int, row_format: RowFormat) -> Tensor:
    """[num_rows, d], a copy: `data` is shared, or read only."""
    shape = (num_rows, row_format.hidden_size)
    if num_rows == 0:
        return torch.empty(shape, dtype=row_format.dtype)
    return torch.frombuffer(bytearray(data), dtype=row_format.dtype).view(shape)


def rows_are_finite(rows: Tensor) -> bool:
    """Whether every number of `rows` (contiguous, on the CPU, of a RowFormat's dtype) is one.

    On the bits, without torch's passes: an infinity or a NaN has every bit of the exponent set.
    """
    if rows.numel() == 0:
        return True
    integer, exponent = _EXPONENTS[rows.dtype]
    bits = np.frombuffer(memoryview(_memory_of(rows)), integer)
    return bool((bits & exponent).max() != exponent)


def check_num_bytes(num_bytes: int, num_rows: int, row_format: RowFormat) -> None:
    """Raises InvalidRequestError unless `num_bytes` are those of `num_rows` rows."""
    expected = num_rows * row_format.row_bytes
    if num_bytes != expected:
        raise InvalidRequestError(
            f"rows have {num_bytes} bytes, accepted: {expected} for {num_rows} rows "
            f"of {row_format.row_bytes}",
            field="rows",
        )


def row_carrier(row_format: RowFormat) -> RowCarrier:
    """The way for rows of `row_format` where no memory is shared."""
    return InlineRows(row_format)
