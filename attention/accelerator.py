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


def converts_e4m3(found: Accelerator | None) -> bool:
    """Whether Triton compiles float8_e4m3fn for a GPU: on NVIDIA only where instructions convert it
    (Ada, sm89, and newer), on AMD always. None: no GPU, so nothing that could not."""
    if found is None or found.vendor != "nvidia":
        return True
    return int(found.architecture.removeprefix("sm")) >= 89


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
