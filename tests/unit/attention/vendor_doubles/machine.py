"""A machine that does not exist: its GPU and its installed packages, as start-up sees them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import pytest

from attention import accelerator
from attention.accelerator import Accelerator

Version = tuple[int, ...]

# Everything that the adapters ask for, new enough.
PACKAGES: Mapping[str, Version] = {
    "triton": (3, 7),
    "flashinfer": (0, 6, 13),
    "cutlass": (4, 5),
    "tokenspeed_mla": (1,),
    "aiter": (0, 1),
}
_DISTRIBUTIONS = {"flashinfer": "flashinfer-python"}

VOLTA = Accelerator("nvidia", "sm70")
TURING = Accelerator("nvidia", "sm75")
AMPERE = Accelerator("nvidia", "sm80")
ADA = Accelerator("nvidia", "sm89")
HOPPER = Accelerator("nvidia", "sm90")
BLACKWELL = Accelerator("nvidia", "sm100")
MI350 = Accelerator("amd", "gfx950")


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    gpu: Accelerator | None,
    packages: Mapping[str, Version] = PACKAGES,
) -> None:
    """From now on this process has `gpu` and `packages` (module -> release) and no others."""
    real_find_spec = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> object:
        if name in PACKAGES:
            return object() if name in packages else None
        return real_find_spec(name, package)

    versions = {_DISTRIBUTIONS.get(name, name): found for name, found in packages.items()}
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: gpu)
    monkeypatch.setattr(accelerator, "version_of", versions.get)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
