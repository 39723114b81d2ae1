"""Bytes on their way into a socket that may have no room for them."""

from __future__ import annotations

from collections import deque
from itertools import islice

from kvbraid.transport.step_socket import StepSocket

# Of one call; Linux takes 1024.
_MAX_PIECES = 256


class OutgoingBytes:
    """What a socket has not taken yet; for one thread at a time."""

    def __init__(self) -> None:
        self._pieces: deque[memoryview] = deque()

    def __len__(self) -> int:
        """Bytes."""
        return sum(map(len, self._pieces))

    def add(self, *pieces: bytes | memoryview) -> None:
        """To be sent behind what waits."""
        self._pieces.extend(memoryview(piece) for piece in pieces if len(piece))

    def write(self, to: StepSocket) -> bool:
        """Send what there is room for; whether that was all. Raises OSError when there will be no
        room any more."""
        try:
            while self._pieces:
                self._drop(to.sendmsg(list(islice(self._pieces, _MAX_PIECES))))
        except BlockingIOError:
            return False
        return True

    def keep(self) -> None:
        """Copy what is left: its owners may change it from now on."""
        self._pieces = deque(memoryview(bytes(piece)) for piece in self._pieces)

    def clear(self) -> None:
        """None of it will be sent."""
        self._pieces.clear()

    def _drop(self, num_bytes: int) -> None:
        while num_bytes:
            piece = self._pieces.popleft()
            if len(piece) > num_bytes:
                self._pieces.appendleft(piece[num_bytes:])
            num_bytes -= min(num_bytes, len(piece))
