"""A checkpoint of the same shape whose numbers differ."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def copy_with_other_weights(model: Path, target: Path) -> Path:
    """A copy of `model` in the new folder `target` in which every number of one tensor differs;
    returns the folder."""
    shutil.copytree(model, target)
    path = target / "model.safetensors"
    tensors = load_file(path)
    name = min(tensors)
    tensors[name] = tensors[name] + 1
    save_file(tensors, path, metadata={"format": "pt"})
    return target
