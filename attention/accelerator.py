"""What GPU and which packages this process has: what start-up decides on. Nothing is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Accelerator:
    """vendor: "nvidia" or "amd"; architecture: "sm90", "gfx950", ... as their compilers say it."""

    vendor: str
    architecture: str


def current_accelerator() -> Accelerator | None:
    """The first GPU, which stands for all of them; None where there is none."""
    if not torch.cuda.is_available():
        return None
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(0).gcnArchName
        return Accelerator("amd", name.split(":")[0])
    major, minor = torch.cuda.get_device_capability(0)
    return Accelerator("nvidia", f"sm{major}{minor}")


# Bytes that a program of an NVIDIA GPU before Ampere may have (CUDA programming guide, technical
# specifications of compute capabilities). Later ones have at least 99 KiB.
_SMALL_SHARED_MEMORY = {"sm70": 96 << 10, "sm72": 96 << 10, "sm75": 64 << 10}


def small_shared_memory(found: Accelerator | None) -> int | None:
    """Bytes of shared memory of a program, of GPUs where they may be too few; None elsewhere.

    These have no tensor core instructions that Triton uses, so that it keeps more in there.
    """
    return None if found is None else _SMALL_SHARED_MEMORY.get(found.architecture)


def has_bfloat16(found: Accelerator | None) -> bool:
    """Whether a GPU computes in bfloat16: of NVIDIA's from Ampere, sm80, on. On older ones torch
    emulates it, slower than float32. None: no GPU, so nothing that could not."""
    return not is_nvidia_before(found, 80)


def converts_e4m3(found: Accelerator | None) -> bool:
    """Whether Triton compiles float8_e4m3fn for a GPU: on NVIDIA only where instructions convert it
    (Ada, sm89, and newer), on AMD always. None: no GPU, so nothing that could not."""
    return not is_nvidia_before(found, 89)


def is_nvidia_before(found: Accelerator | None, capability: int) -> bool:
    """Whether it is a GPU of NVIDIA's with less than this compute capability, 80 for 8.0."""
    if found is None or found.vendor != "nvidia":
        return False
    return int(found.architecture.removeprefix("sm")) < capability


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors (compute units on AMD); 1 for a CPU."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def has_module(name: str) -> bool:
    """Whether the top-level module `name` could be imported."""
    return importlib.util.find_spec(name) is not None


def version_of(distribution: str) -> tuple[int, ...] | None:
    """Numeric release of an installed distribution, as (0, 6, 13); None if it is absent."""
    try:
        text = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    release = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        release.append(int(part))
    return tuple(release)
