"""The ready file: how a process tells the one that started it where it serves."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from kvbraid.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ReadyReport:
    """Addresses (host:port) of a serving process.

    http: empty where there is no HTTP API. health: of the plaintext health service, empty without
    one. tls: whether grpc and http speak TLS.
    """

    role: str
    pid: int
    grpc: str
    metrics: str
    http: str = ""
    health: str = ""
    tls: bool = False

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def check_ready_file(path: str) -> None:
    """Raises ConfigError where `path` could never be written: better now than after loading."""
    folder = Path(path).parent
    if path and not folder.is_dir():
        raise ConfigError(f"ready_file is {path}, accepted: a file in a folder that exists")


def write_ready(path: str | Path, report: ReadyReport) -> None:
    """Write `report` to `path`, whole or not at all. An empty path writes nothing.

    Call it once health says SERVING:
    `write_ready(config.server.ready_file, ReadyReport("decode", os.getpid(), server.address, ...))`
    """
    if not str(path):
        return
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    partial.write_text(report.to_json() + "\n", encoding="utf-8")
    os.replace(partial, target)


def read_ready(path: str | Path) -> ReadyReport | None:
    """The report in `path`, None while there is none. Raises ValueError for anything else."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return ReadyReport(**json.loads(text))
