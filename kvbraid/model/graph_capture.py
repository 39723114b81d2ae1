"""What a forward pass needs to be captured in a graph and replayed; no device is named here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class GraphCapture(Protocol):
    """Records launches so that they can be repeated at once."""

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """`compute` is called once or more; the call returned repeats what it launched, on the same
        memory and in the order of the current stream."""
        ...


def graph_size(number: int, most: int) -> int:
    """Places of the graph that serves `number` sequences or rows: a power of two, or the most.

    Padding then at most doubles the work, and few graphs serve all numbers.
    """
    return min(1 << (number - 1).bit_length(), most)
