"""Small host tensors on their way to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def uploaded(values: Tensor, device: torch.device) -> Tensor:
    """`values` (on the CPU) on the device, in the order of the current stream.

    From ordinary memory the host would wait for everything that the device still has to do: a
    sampler's rows would wait for the whole forward pass, and the device then for the host.
    """
    if device.type != "cuda" or not values.numel():
        return values.to(device)
    # Pinned memory of torch's host allocator is not given out again before the copy is done.
    return values.pin_memory().to(device, non_blocking=True)
