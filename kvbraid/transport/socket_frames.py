"""Messages of a drafting stream on a socket: frames, and the token that comes before them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvbraid.errors import DataLossError
from kvbraid.transport.step_socket import MAX_RECORD_BYTES, StepSocket

TOKEN_BYTES = 32
ACCEPTED = b"\x01"

_LENGTHS = struct.Struct("<II")
_ROOM_BYTES = 256 << 10
# Memory for a longer frame is given back after it.
_MAX_KEPT_BYTES = 4 << 20


def frame_of(message: bytes, rows: Sequence[memoryview] = ()) -> bytes:
    """The beginning of a frame, to be sent before `rows`: their lengths and `message`."""
    return _LENGTHS.pack(len(message), sum(map(len, rows))) + message


class Frame(NamedTuple):
    """What was received. rows: a view, whose bytes stay until more is received."""

    message: bytes
    rows: memoryview


class ReceivedFrames:
    """Cuts what a socket brings into frames of at most `max_bytes`.

    Its memory is its own and lasts: a new one for every message would cost more than the message.
    It grows with what has come, not with what is announced.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._memory = bytearray(_ROOM_BYTES)
        self._begin = self._end = 0

    def receive(self, source: StepSocket) -> bool:
        """Read what is there; False at the end. Raises BlockingIOError when nothing is there yet,
        OSError when nothing will be."""
        self._make_room()
        with memoryview(self._memory) as memory, memory[self._end :] as room:
            num_bytes = source.recv_into(room)
        self._end += num_bytes
        return num_bytes > 0

    def __iter__(self) -> Iterator[Frame]:
        """The frames that are whole by now; each is given once.

        Raises DataLossError for one that is longer than any may be.
        """
        while self._end - self._begin >= _LENGTHS.size:
            num_message, num_rows = _LENGTHS.unpack_from(self._memory, self._begin)
            if num_message + num_rows > self._max_bytes:
                raise DataLossError(
                    f"a frame of {num_message + num_rows} bytes, accepted: {self._max_bytes}"
                )
            begin = self._begin + _LENGTHS.size
            middle = begin + num_message
            if middle + num_rows > self._end:
                return
            self._begin = middle + num_rows
            memory = memoryview(self._memory)
            yield Frame(bytes(memory[begin:middle]), memory[middle : self._begin])

    def _make_room(self) -> None:
        if self._begin == self._end:
            self._begin = self._end = 0
            if len(self._memory) > _MAX_KEPT_BYTES:
                self._memory = bytearray(_ROOM_BYTES)
        elif len(self._memory) - self._end < MAX_RECORD_BYTES:
            left = self._memory[self._begin : self._end]
            self._memory = left + bytes(max(_ROOM_BYTES, len(left)))
            self._begin, self._end = 0, len(left)
