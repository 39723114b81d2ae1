"""Frames on the wire."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from kvbraid.errors import DataLossError
from kvbraid.transport.frame import (
    HEADER_BYTES,
    FrameHeader,
    decode_frame,
    decode_head,
    encode_head,
    is_intact,
    largest_payload,
)

HEADER = FrameHeader(
    src_rank=3,
    dst_rank=513,
    transfer_id=bytes(range(16)),
    incarnation=2**64 - 1,
    generation=7,
    number=9,
    layer_start=4,
    num_layers=2,
    head_start=1,
    num_heads=2,
    num_positions=3,
    payload_bytes=24,
)
POSITIONS = np.array([5, 9, 2**31 - 1], dtype=np.int32)
PAYLOAD = bytes(range(100, 124))
FRAME = encode_head(HEADER, POSITIONS, PAYLOAD) + PAYLOAD


def test_decoding_gives_back_what_was_encoded() -> None:
    head, payload = decode_frame(FRAME)
    assert replace(head.header, checksum=0) == HEADER
    assert head.positions.tolist() == POSITIONS.tolist()
    assert bytes(payload) == PAYLOAD
    assert head.header.num_rows == 12
    assert is_intact(head, payload)


def test_layout_of_the_bytes_is_the_documented_one() -> None:
    """Workers of other versions read these bytes."""
    assert FRAME[:6] == b"KVBF" + struct.pack("<H", 1)
    assert FRAME[10:26] == HEADER.transfer_id
    assert FRAME[HEADER_BYTES : HEADER_BYTES + 12] == struct.pack("<3i", 5, 9, 2**31 - 1)
    covered = FRAME[: HEADER_BYTES - 8] + FRAME[HEADER_BYTES:]
    checksum = struct.unpack("<Q", FRAME[HEADER_BYTES - 8 : HEADER_BYTES])[0]
    assert checksum == xxhash.xxh3_64_intdigest(covered)


@pytest.mark.parametrize("message_bytes", [1000, 65536, 1 << 20])
def test_the_largest_payload_fits_into_its_message(message_bytes: int) -> None:
    """With as many positions as it may have, of 64 bytes each."""
    payload = bytes(largest_payload(message_bytes))
    positions = np.arange(len(payload) // 64, dtype=np.int32)
    header = replace(HEADER, num_positions=len(positions), payload_bytes=len(payload))
    frame_bytes = len(encode_head(header, positions, payload) + payload)
    assert message_bytes - 64 - 4 <= frame_bytes <= message_bytes


def test_no_damaged_byte_goes_unnoticed() -> None:
    for index in range(len(FRAME)):
        damaged = bytearray(FRAME)
        damaged[index] ^= 0x40
        try:
            head, payload = decode_frame(damaged)
        except DataLossError:
            continue
        assert not is_intact(head, payload), f"byte {index}"


def test_cut_frames_are_data_loss() -> None:
    for length in range(len(FRAME)):
        with pytest.raises(DataLossError):
            decode_frame(FRAME[:length])


def test_frame_of_another_version_is_refused() -> None:
    with pytest.raises(DataLossError, match="not a frame of version 1"):
        decode_head(FRAME[:4] + b"\x02\x00" + FRAME[6:])


def test_heartbeat_has_no_rows_and_is_intact() -> None:
    empty = replace(HEADER, num_layers=0, num_heads=0, num_positions=0, payload_bytes=0)
    head = decode_head(encode_head(empty, np.empty(0, np.int32), b""))
    assert head.header.num_rows == 0
    assert is_intact(head, b"")
