"""What the triton kernels need of shared memory on GPUs that may have too little of it.

From sm80 on, and on AMD, every launch fits (see triton_tuning). Before sm80 Triton has neither
tensor core instructions nor asynchronous copies and keeps both factors of a product in shared
memory, however few stages a launch asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attention import accelerator
from attention.interface import MLAGeometry

if TYPE_CHECKING:
    from attention.dispatch import AttentionNeeds

# Bytes that Triton 3.9 takes for sm75, by bytes of an element: decode of latents that fill a tile
# of 512 columns, and extend of heads that fill one of 256. What is narrower fits in 64 KiB.
DECODE_LATENTS = {2: 100 << 10, 4: 72 << 10}
EXTEND_WIDE_HEADS = {2: 96 << 10, 4: 80 << 10}
NARROW_LATENTS = 256
NARROW_HEADS = 128


def shared_memory_refusals(needs: AttentionNeeds) -> list[str]:
    """What this process's GPU has too little shared memory for; empty on newer GPUs."""
    found = accelerator.current_accelerator()
    there = accelerator.small_shared_memory(found)
    if needs.device != "cuda" or found is None or there is None:
        return []
    return [
        f"{what} needs {needed >> 10} KiB of shared memory in {needs.dtype}; "
        f"GPU {found.architecture} has {there >> 10} KiB"
        for what, needed in _wide_tiles(needs)
        if needed > there
    ]


def _wide_tiles(needs: AttentionNeeds) -> list[tuple[str, int]]:
    """What is wide in `needs`, and the bytes that it takes."""
    # Other dtypes are refused anyway.
    itemsize, geometry = needs.dtype.itemsize, needs.geometry
    if itemsize not in DECODE_LATENTS:
        return []
    if isinstance(geometry, MLAGeometry):
        rank, head_dim = geometry.kv_lora_rank, max(geometry.qk_nope_head_dim, geometry.v_head_dim)
    else:
        rank, head_dim = 0, geometry.head_dim
    wide = []
    if needs.operations - {"extend"} and rank > NARROW_LATENTS:
        wide.append((f"decode of kv_lora_rank {rank}", DECODE_LATENTS[itemsize]))
    if "extend" in needs.operations and head_dim > NARROW_HEADS:
        wide.append((f"extend with heads of {head_dim}", EXTEND_WIDE_HEADS[itemsize]))
    return wide
