"""Tensors of a Hugging Face folder: model.safetensors, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvbraid.errors import CheckpointError
from kvbraid.model.tensor_source import ReadListener, StoredTensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsSource:
    """Reads slices of memory-mapped safetensors files; nothing else is materialised."""

    def __init__(
        self,
        folder: Path,
        on_read: ReadListener | None = None,
        *,
        dtypes: Mapping[str, torch.dtype] = DTYPES,
    ) -> None:
        """dtypes: the stored formats that may be read."""
        self.origin = str(folder)
        self._on_read = on_read
        self._dtypes = dtypes
        self._handles: dict[str, Any] = {}
        self._tensors: dict[str, StoredTensor] = {}
        for path, names in _files(folder).items():
            self._open(path, names)

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor of every file."""
        return self._tensors

    def _open(self, path: Path, indexed: set[str]) -> None:
        try:
            handle: Any = safe_open(path, framework="pt")
            present = set(handle.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: truncated or damaged: {error}") from error
        missing = sorted(indexed - present)
        if missing:
            raise CheckpointError(f"{path}: lacks {missing[0]}, which {INDEX_FILE} puts here")
        for name in present:
            if name in self._tensors:
                raise CheckpointError(f"{path}: tensor {name} is in another shard too")
            view = handle.get_slice(name)
            self._handles[name] = handle
            self._tensors[name] = StoredTensor(tuple(view.get_shape()), view.get_dtype())

    def read(self, name: str, bounds: tuple[range, ...]) -> Tensor:
        """As TensorSource.read. Raises CheckpointError for a format that may not be read."""
        stored = self._tensors[name]
        dtype = self._dtypes.get(stored.format)
        if dtype is None:
            accepted = ", ".join(self._dtypes)
            raise CheckpointError(
                f"{self.origin}: tensor {name} is {stored.format}; accepted: {accepted}"
            )
        if not all(bounds):
            return torch.empty([len(bound) for bound in bounds], dtype=dtype)
        view = self._handles[name].get_slice(name)
        part: Tensor = view[tuple(slice(bound.start, bound.stop) for bound in bounds)]
        if self._on_read is not None:
            self._on_read(name, part.nbytes)
        # The slice is a view of the mapped file: weights must outlive it, even when it is replaced.
        return part.clone(memory_format=torch.contiguous_format)


def _files(folder: Path) -> dict[Path, set[str]]:
    """Each file and the tensors that the index expects in it."""
    index = folder / INDEX_FILE
    if index.is_file():
        return _indexed_files(index)
    single = folder / SINGLE_FILE
    if single.is_file():
        return {single: set()}
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    note = ""
    if pickles:
        note = f"; pickle files such as {pickles[0]} are never loaded: convert them to safetensors"
    raise CheckpointError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}{note}")


def _indexed_files(index: Path) -> dict[Path, set[str]]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files: dict[Path, set[str]] = {}
        for name, file_name in weight_map.items():
            if Path(file_name).name != file_name:
                raise CheckpointError(f"{index}: {name} is in {file_name!r}, outside the folder")
            files.setdefault(index.parent / file_name, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index with a weight_map: {error}") from error
    for path in files:
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, but {INDEX_FILE} names it")
    return files
