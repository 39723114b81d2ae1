"""Launch shapes of the triton extend kernel: what fits Hopper without spilling, not yet swept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendShape:
    """How the extend kernel is launched.

    block_rows: rows (query of the chunk, query head) of a program. block_keys: keys of a step.
    tma: keys come by the copy engine where GPU and tensors allow it. num_warps, num_stages: as in
    Triton. programs_per_sm: programs that an SM has room for.
    """

    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int
    tma: bool = True
    programs_per_sm: int = 1


def extend_shape(*, rows: int, width: int, itemsize: int, is_hopper: bool) -> ExtendShape:
    """The shape for at most `rows` rows of a sequence and KV head and elements of `itemsize` bytes.

    width: the wider of a key and a value, padded.
    """
    if itemsize > 2:
        # Without tensor cores a thread holds whole rows of both factors.
        if width <= 64:
            return ExtendShape(block_rows=32, block_keys=32, num_warps=4, num_stages=1)
        return ExtendShape(block_rows=16, block_keys=32, num_warps=8, num_stages=1)
    if is_hopper:
        return _small_hopper_shape(width) if rows <= 64 else _hopper_shape(width)
    # Not measured: fits the registers of older NVIDIA GPUs and the 64 KiB that AMD's units share.
    return ExtendShape(
        block_rows=64, block_keys=64 if width <= 128 else 32, num_warps=4, num_stages=1
    )


def _hopper_shape(width: int) -> ExtendShape:
    if width <= 64:
        return ExtendShape(
            block_rows=128, block_keys=64, num_warps=8, num_stages=3, programs_per_sm=2
        )
    keys = 128 if width <= 192 else 64
    return ExtendShape(block_rows=128, block_keys=keys, num_warps=8, num_stages=2)


def _small_hopper_shape(width: int) -> ExtendShape:
    # Two programs fill what the other waits for: up to here both fit the shared memory.
    together = 2 if width <= 192 else 1
    stages = 3 if width <= 64 else 2
    return ExtendShape(
        block_rows=64, block_keys=64, num_warps=4, num_stages=stages, programs_per_sm=together
    )
