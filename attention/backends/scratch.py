"""Buffers that outlive a step, so that a layer's gather does not pay for fresh memory."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Named buffers that grow to the largest size asked for and are then reused.

    Fresh memory costs a page fault per 4 KiB, on CPU four times the copy itself. A buffer handed
    out is valid until the next `take` of the same name.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """An uninitialised contiguous tensor of this shape."""
        size = 1
        for length in shape:
            size *= length
        buffer = self._buffers.get(name)
        if (
            buffer is None
            or buffer.numel() < size
            or buffer.dtype != dtype
            or buffer.device != device
        ):
            # An inference tensor could not be written again outside inference mode.
            with torch.inference_mode(False):
                buffer = torch.empty(size, dtype=dtype, device=device)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)
