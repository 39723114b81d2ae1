"""How fused rows travel between processes; here: in the message itself, as raw bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvbraid.errors import InvalidRequestError
from kvbraid.v1 import draft_pb2 as pb

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_EXPONENTS = {
    torch.float32: (torch.int32, np.int32(0x7F800000)),
    torch.bfloat16: (torch.int16, np.int16(0x7F80)),
    torch.float16: (torch.int16, np.int16(0x7C00)),
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
        present = [part for part in rows if part.shape[0]]
        if not present:
            return
        whole = torch.cat(present) if len(present) > 1 else present[0]
        if whole.dtype != self._format.dtype or whole.device.type != "cpu":
            whole = whole.to(device="cpu", dtype=self._format.dtype)
        if not whole.is_contiguous():
            whole = whole.contiguous()
        # Its bytes, without torch: a small step would spend more on views than on the wire.
        into.inline = ctypes.string_at(whole.data_ptr(), whole.nbytes)

    def unpack(self, message: pb.DraftRows, num_rows: int) -> Tensor:
        """See RowCarrier."""
        expected = num_rows * self._format.row_bytes
        data = message.inline
        check_num_bytes(len(data), num_rows, self._format)
        shape = (num_rows, self._format.hidden_size)
        if num_rows == 0:
            return torch.empty(shape, dtype=self._format.dtype)
        # A copy: the message's bytes are shared and read only.
        rows = torch.empty(shape, dtype=self._format.dtype)
        ctypes.memmove(rows.data_ptr(), data, expected)
        return rows


def rows_are_finite(rows: Tensor) -> bool:
    """Whether every number of `rows` (on the CPU, of a RowFormat's dtype) is one.

    On the bits, without torch's passes: an infinity or a NaN has every bit of the exponent set.
    """
    integer, exponent = _EXPONENTS[rows.dtype]
    bits = rows.view(integer).numpy() & exponent
    return not bool((bits == exponent).any())


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
