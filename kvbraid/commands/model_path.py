"""From what a person calls a model to where it lies."""

from __future__ import annotations

from pathlib import Path

from kvbraid.errors import NotFoundError
from kvbraid.settings import models_directory


def resolve_model(name: str) -> Path:
    """The folder or file of `name`: a path, or the name of a pulled model.

    Raises NotFoundError saying how to fetch it.
    """
    for candidate in (Path(name), models_directory() / name):
        if candidate.exists():
            return candidate
    raise NotFoundError(
        f"model {name!r} is neither a path nor in {models_directory()}; "
        f"fetch it with: kvbraid model pull {name}"
    )
