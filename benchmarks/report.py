"""Result files of benchmarks: rows beside commit, machine and versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "transformers", "numpy", "grpcio", "triton", "flashinfer-python")


@dataclass(frozen=True, slots=True)
class BenchmarkRow:
    """One measured case. ratio is ours / peer in the sense that the case names; bar is what it
    has to reach, None when it is only reported."""

    case: str
    ours: float
    peer: float
    ratio: float
    bar: float | None
    holds: bool

    @staticmethod
    def equality(case: str, holds: bool) -> BenchmarkRow:
        """A case that is right or wrong: 1 or 0 against 1."""
        return BenchmarkRow(case, float(holds), 1.0, float(holds), 1.0, holds)


def write_report(path: Path, benchmark: str, rows: Sequence[BenchmarkRow]) -> None:
    """Write `rows` with commit, machine and versions as JSON."""
    report = {
        "benchmark": benchmark,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "machine": _machine(),
        "versions": _versions(),
        "rows": [asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _commit() -> str:
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    changed = subprocess.run(
        ["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return f"{head}{' with changes' if changed else ''}"


def _machine() -> dict[str, object]:
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        processor = names[0].split(":", 1)[1].strip() if names else processor
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "gpus": _gpus(),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
