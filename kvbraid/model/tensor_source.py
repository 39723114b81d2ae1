"""Where a model's tensors come from, named as Hugging Face names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

# Called with a tensor's name and the bytes that were just materialised from it.
ReadListener = Callable[[str, int], None]


class StoredTensor(NamedTuple):
    """A tensor in a checkpoint: its shape ([out, in] for matrices) and the name of its format."""

    shape: tuple[int, ...]
    format: str


class TensorSource(Protocol):
    """Reads parts of named tensors from one checkpoint."""

    @property
    def origin(self) -> str:
        """File or folder, for error messages."""
        ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor of the checkpoint."""
        ...

    def read(self, name: str, bounds: tuple[range, ...]) -> Tensor:
        """The part of `name` inside `bounds` (one range a dimension, step 1), and no more than
        the quantisation blocks around it, as a fresh CPU tensor of its stored precision.

        A source tells its ReadListener what it materialised to get there."""
        ...
