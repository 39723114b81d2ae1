"""One frame: rows of one transfer from one source rank to one destination rank.

Bytes, little-endian: header (HEADER_BYTES), int32 positions [num_positions], payload
[num_layers, num_positions, num_heads, row_bytes]. The checksum, the header's last field, is
xxh3_64 over everything else. A frame without positions carries no payload: a heartbeat.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvbraid.errors import DataLossError

MAGIC = b"KVBF"
VERSION = 1
# magic, version, src_rank, dst_rank, transfer_id, incarnation, generation, number,
# layer_start, num_layers, head_start, num_heads, num_positions, payload_bytes, checksum
_FIELDS = struct.Struct("<4sHHH16sQIIHHHHIIQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a frame says of itself. Layers and heads are global ids of the model.

    incarnation, generation: copied from the grant. number: counts the frames of one source rank
    to one destination rank, from 0.
    """

    src_rank: int
    dst_rank: int
    transfer_id: bytes
    incarnation: int
    generation: int
    number: int
    layer_start: int
    num_layers: int
    head_start: int
    num_heads: int
    num_positions: int
    payload_bytes: int
    checksum: int = 0

    @property
    def num_rows(self) -> int:
        """Rows in the frame: layer x position x head."""
        return self.num_layers * self.num_positions * self.num_heads


class FrameHead(NamedTuple):
    """A frame without its payload. positions: int32 [num_positions]."""

    header: FrameHeader
    positions: NDArray[np.int32]


def encode_head(header: FrameHeader, positions: NDArray[np.int32], payload: Buffer) -> bytes:
    """Header and positions as bytes, with the checksum over them and `payload` filled in.

    The frame on the wire is these bytes followed by the payload.
    """
    fields = _pack(header, checksum=0)[: -_CHECKSUM.size]
    position_bytes = positions.astype("<i4", copy=False).tobytes()
    return fields + _CHECKSUM.pack(_digest(fields, position_bytes, payload)) + position_bytes


def largest_payload(message_bytes: int) -> int:
    """Bytes of rows that a frame in a message of `message_bytes` has room for. A position has 4
    bytes in the frame's head and at least 64 in its payload."""
    return max(0, message_bytes - HEADER_BYTES) * 16 // 17


def decode_head(data: Buffer) -> FrameHead:
    """Header and positions at the start of `data`; a view, no copy.

    Raises DataLossError when it is no frame of this version or is cut short. Nothing in it is
    to be believed before `is_intact`.
    """
    if len(data) < HEADER_BYTES:
        raise DataLossError(f"a frame head has at least {HEADER_BYTES} bytes, got {len(data)}")
    magic, version, *fields = _FIELDS.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise DataLossError(f"not a frame of version {VERSION}: {magic!r} version {version}")
    header = FrameHeader(*fields)
    if len(data) < HEADER_BYTES + 4 * header.num_positions:
        raise DataLossError(f"{header.num_positions} positions do not fit in {len(data)} bytes")
    positions = np.frombuffer(data, "<i4", header.num_positions, HEADER_BYTES)
    return FrameHead(header, positions)


def decode_frame(data: Buffer) -> tuple[FrameHead, memoryview]:
    """Head and payload of a whole frame; views, no copy. Raises DataLossError like `decode_head`,
    and when the payload is not as long as the header says."""
    head = decode_head(data)
    payload = memoryview(data)[HEADER_BYTES + head.positions.nbytes :]
    if payload.nbytes != head.header.payload_bytes:
        raise DataLossError(f"payload of {head.header.payload_bytes} bytes has {payload.nbytes}")
    return head, payload


def is_intact(head: FrameHead, payload: Buffer) -> bool:
    """Whether header, positions and payload are the ones that the checksum was made of."""
    fields = _pack(head.header, checksum=0)[: -_CHECKSUM.size]
    return _digest(fields, head.positions.tobytes(), payload) == head.header.checksum


def _pack(header: FrameHeader, checksum: int) -> bytes:
    return _FIELDS.pack(
        MAGIC,
        VERSION,
        header.src_rank,
        header.dst_rank,
        header.transfer_id,
        header.incarnation,
        header.generation,
        header.number,
        header.layer_start,
        header.num_layers,
        header.head_start,
        header.num_heads,
        header.num_positions,
        header.payload_bytes,
        checksum,
    )


def _digest(fields: bytes, positions: bytes, payload: Buffer) -> int:
    digest = xxhash.xxh3_64(fields)
    digest.update(positions)
    digest.update(payload)
    return digest.intdigest()
