"""`kvbraid doctor`: what this machine offers, and what it would choose."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

from kvbraid import __version__

_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "grpcio", "protobuf", "gguf", "aiohttp")
# Transport -> module that it needs.
_TRANSPORTS = {"shared_memory": "mmap", "grpc_push": "grpc", "nixl": "nixl_cu12"}
_SHARED_MEMORY = Path("/dev/shm")
_DCP_SIZES = (1, 2, 4, 8)
_LONG_CELL = 16

Report = dict[str, object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--dcp",
        type=_sizes,
        default=_DCP_SIZES,
        metavar="C,C,...",
        help="stripe widths of the attention table [1,2,4,8]",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Exit code 1 when something that KVBraid cannot do without is missing."""
    report = examine(arguments.dcp)
    print(json.dumps(report, indent=2) if arguments.json else _as_text(report))
    return 1 if report["problems"] else 0


def examine(dcp_sizes: Sequence[int] = _DCP_SIZES) -> Report:
    """Everything the command prints, by section. dcp_sizes: columns of the attention table."""
    versions = {name: _version(name) for name in _PACKAGES}
    problems = [f"{name} is not installed" for name, found in versions.items() if found is None]
    shared_memory = _shared_memory()
    if not shared_memory:
        problems.append(f"{_SHARED_MEMORY} is missing: ranks need --communicator gloo")
    return {
        "kvbraid": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "packages": versions,
        "devices": _devices() if versions["torch"] else [],
        "shared_memory": shared_memory,
        "transports": {name: _can_import(module) for name, module in _TRANSPORTS.items()},
        "attention": _attention(dcp_sizes) if versions["torch"] else [],
        "problems": problems,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _can_import(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _shared_memory() -> dict[str, float]:
    if not _SHARED_MEMORY.is_dir():
        return {}
    usage = shutil.disk_usage(_SHARED_MEMORY)
    return {"size_gb": round(usage.total / 1e9, 2), "free_gb": round(usage.free / 1e9, 2)}


def _devices() -> list[str]:
    torch = importlib.import_module("torch")
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return [f"cpu ({torch.get_num_threads()} threads)", *gpus]


def _attention(dcp_sizes: Sequence[int]) -> list[dict[str, str]]:
    """Backends by operation and stripe width, as the engine would choose them here."""
    table = importlib.import_module("kvbraid.commands.attention_table")
    rows: list[dict[str, str]] = table.attention_table(dcp_sizes)
    return rows


def _sizes(text: str) -> tuple[int, ...]:
    """The flag's value: 1,2,4 -> (1, 2, 4)."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be sizes >= 1, as in 1,2,4,8")
    return tuple(map(int, parts))


def _as_text(report: Report) -> str:
    lines = []
    for section, value in report.items():
        if isinstance(value, dict):
            lines.append(f"{section}:")
            lines += [f"  {key:16} {_word(item)}" for key, item in value.items()]
        elif isinstance(value, list):
            lines.append(f"{section}:{'' if value else ' none'}")
            lines += [f"  {line}" for line in _table(value)]
        else:
            lines.append(f"{section + ':':18} {value}")
    return "\n".join(lines)


def _word(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "missing" if value is None else value


def _table(rows: list[dict[str, str] | str]) -> list[str]:
    records = [row for row in rows if isinstance(row, dict)]
    if not records:
        return [str(row) for row in rows]
    cells = [list(records[0]), *(_without_repeats(list(record.values())) for record in records)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _without_repeats(line: list[str]) -> list[str]:
    """A long cell that equals the one before it becomes a ditto mark."""
    return [
        '"' if i and len(cell) > _LONG_CELL and cell == line[i - 1] else cell
        for i, cell in enumerate(line)
    ]
