"""A drafter of a trained one's shape with random weights: hardly any of its drafts come true."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def write_random_drafter(like: Path, folder: Path, *, seed: int = 0) -> Path:
    """Write the drafter into `folder` and return it.

    like: folder of the trained drafter. Its config and its maps between vocabularies are kept, its
    norms as well: a drafter whose numbers explode would be found out at once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(like / "config.json", folder / "config.json")
    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, Tensor] = {}
    for path in sorted(like.glob("*.safetensors")):
        stored |= load_file(path)
    weights = {name: _random_as(tensor, generator) for name, tensor in sorted(stored.items())}
    save_file(weights, folder / "model.safetensors")
    return folder


def _random_as(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Matrices are drawn, of a scale that keeps their outputs as large as their inputs."""
    if tensor.dim() < 2 or not tensor.is_floating_point():
        return tensor
    drawn = torch.randn(tensor.shape, generator=generator) / math.sqrt(tensor.shape[-1])
    return drawn.to(tensor.dtype)
