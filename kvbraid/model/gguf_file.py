"""The GGUF container: header, metadata and where each tensor lies. Torch-free.

The `gguf` package's reader builds one array per token string (seconds for a large vocabulary);
this one leaves string arrays unread until asked for, and checks every tensor against the file's
length before anything is loaded.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvbraid.errors import CheckpointError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its type, shape with the slowest dimension first, and bytes in the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StringArray:
    """A metadata array of strings that has not been read; `length` entries."""

    length: int


class GgufFile:
    """A GGUF file, memory-mapped. Raises CheckpointError when it is damaged, naming the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as handle:
                self.data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        self._position = 0
        self.metadata: dict[str, object] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise CheckpointError(
                f"{path}: truncated or damaged GGUF header near byte {self._position}: {error}"
            ) from error

    def _parse(self) -> None:
        if self._take(4) != MAGIC:
            raise CheckpointError(f"{self.path}: not a GGUF file: it starts with {self.data[:4]!r}")
        version = self._scalar(4)
        if version not in (2, 3):
            raise CheckpointError(f"{self.path}: GGUF version {version}; accepted: 2 and 3")
        num_tensors, num_keys = self._scalar(10), self._scalar(10)
        assert isinstance(num_tensors, int)
        assert isinstance(num_keys, int)
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._integer(4))
        headers = [self._tensor_header() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment {alignment!r} must be >= 1")
        start = -(-self._position // alignment) * alignment
        for name, kind, shape, offset in headers:
            self.tensors[name] = self._place(name, kind, shape, start + offset)

    def _place(
        self, name: str, kind: GGMLQuantizationType, shape: tuple[int, ...], offset: int
    ) -> GgufTensor:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise CheckpointError(
                f"{self.path}: tensor {name} {list(shape)} has rows that are not whole "
                f"{kind.name} blocks of {block}"
            )
        count = 1
        for size in shape:
            count *= size
        num_bytes = count // block * block_bytes
        if offset + num_bytes > len(self.data):
            raise CheckpointError(
                f"{self.path}: truncated: tensor {name} ends at byte {offset + num_bytes}, "
                f"the file has {len(self.data)}"
            )
        return GgufTensor(name, kind, shape, offset, num_bytes)

    def _tensor_header(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self._string()
        dims = [self._integer(10) for _ in range(self._integer(4))]
        code = self._integer(4)
        try:
            kind = GGMLQuantizationType(code)
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}: tensor {name} has unknown GGUF type {code}"
            ) from error
        if not dims or name in self.tensors:
            raise CheckpointError(f"{self.path}: tensor {name} has no dimensions or is repeated")
        return name, kind, tuple(reversed(dims)), self._integer(10)

    def _take(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self.data):
            raise struct.error(f"{count} bytes wanted, {len(self.data) - self._position} left")
        piece = self.data[self._position : end]
        self._position = end
        return piece

    def _scalar(self, code: int) -> object:
        layout = _SCALARS[code]
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _integer(self, code: int) -> int:
        value = self._scalar(code)
        assert isinstance(value, int)
        return value

    def _string(self) -> str:
        return self._take(self._integer(10)).decode("utf-8")

    def _skip_string(self) -> None:
        end = self._position + 8 + struct.unpack_from("<Q", self.data, self._position)[0]
        if end > len(self.data):
            raise struct.error(f"string at byte {self._position} runs past the end")
        self._position = end

    def _value(self, code: int) -> object:
        if code == _STRING:
            return self._string()
        if code != _ARRAY:
            return self._scalar(code)
        element, length = self._integer(4), self._integer(10)
        if element == _STRING:
            for _ in range(length):
                self._skip_string()
            return StringArray(length)
        if element == _ARRAY:
            return [self._value(_ARRAY) for _ in range(length)]
        layout = _SCALARS[element]
        size = struct.calcsize(layout)
        return list(struct.unpack(f"<{length}{layout[1]}", self._take(size * length)))
