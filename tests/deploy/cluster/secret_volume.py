"""The folder of a Secret in a pod, as a kubelet writes it and replaces it: all files at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DATA = "..data"
SecretData = Mapping[str, bytes]


class SecretVolume:
    """What a pod has mounted of one Secret. volume: its entry in the pod; group: its fsGroup."""

    def __init__(self, volume: dict[str, Any], group: int, folder: Path) -> None:
        self.secret_name: str = volume["secret"]["secretName"]
        self.folder = folder
        self._items: list[dict[str, str]] = volume["secret"]["items"]
        self._mode: int = volume["secret"]["defaultMode"]
        self._group = group
        self._num_versions = 0

    def write(self, data: SecretData) -> None:
        """Put the Secret's data there. Raises KeyError where it lacks a file that the pod wants,
        with which a kubelet does not start the pod."""
        wanted = {item["path"]: data[item["key"]] for item in self._items}
        self._num_versions += 1
        version = self.folder / f"..version-{self._num_versions}"
        version.mkdir(parents=True)
        self.folder.chmod(0o755)
        version.chmod(0o755)
        for name, content in wanted.items():
            self._write_file(version / name, content)
        fresh = self.folder / "..fresh"
        fresh.symlink_to(version.name)
        fresh.rename(self.folder / _DATA)
        for name in wanted:
            link = self.folder / name
            if not link.is_symlink():
                link.symlink_to(f"{_DATA}/{name}")

    def _write_file(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        os.chown(path, 0, self._group)
        path.chmod(self._mode)
