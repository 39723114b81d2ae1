"""Tensors under other names than their file gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from kvbraid.errors import CheckpointError
from kvbraid.model.tensor_source import StoredTensor, TensorSource


class RenamedSource:
    """A TensorSource over another one; may leave tensors out and add computed ones."""

    def __init__(
        self,
        source: TensorSource,
        rename: Callable[[str], str],
        *,
        hidden: frozenset[str] = frozenset(),
        added: Mapping[str, Tensor] | None = None,
    ) -> None:
        """hidden and added hold new names. Raises CheckpointError when two get one name."""
        self._source = source
        self._added = dict(added or {})
        self._stored_names: dict[str, str] = {}
        for stored_name in sorted(source.tensors):
            name = rename(stored_name)
            if name in self._stored_names:
                raise CheckpointError(
                    f"{source.origin}: tensors {self._stored_names[name]} and {stored_name} "
                    f"are both {name}"
                )
            self._stored_names[name] = stored_name
        for name in hidden:
            self._stored_names.pop(name, None)
        self._tensors = {
            name: source.tensors[stored_name] for name, stored_name in self._stored_names.items()
        }
        for name, tensor in self._added.items():
            self._tensors[name] = StoredTensor(tuple(tensor.shape), "computed")

    @property
    def origin(self) -> str:
        """The file's."""
        return self._source.origin

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """By new name."""
        return self._tensors

    def read(self, name: str, bounds: tuple[range, ...]) -> Tensor:
        """As TensorSource.read, by new name."""
        added = self._added.get(name)
        if added is None:
            return self._source.read(self._stored_names[name], bounds)
        return added[tuple(slice(bound.start, bound.stop) for bound in bounds)].clone()
