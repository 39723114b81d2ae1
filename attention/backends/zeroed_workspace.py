"""A vendor kernel's workspace: zero when first used, and nobody else's."""

from __future__ import annotations

import torch
from torch import Tensor


class ZeroedWorkspace:
    """int8 memory that grows when a launch needs more.

    Kernels keep counters in it that must be zero at first and that they reset themselves, so
    fresh memory is zeroed and one workspace serves one kind of kernel only.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """int8, at least [num_bytes], contiguous."""
        buffer = self._buffer
        if buffer is None or buffer.numel() < num_bytes or buffer.device != device:
            # An inference tensor could not be written again outside inference mode.
            with torch.inference_mode(False):
                buffer = torch.zeros(num_bytes, dtype=torch.int8, device=device)
            self._buffer = buffer
        return buffer
