"""Runs a program with Triton's interpreter, which executes the kernels on CPU.

A process of its own, because Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def interpreter_obstacle() -> str | None:
    """Why the interpreter cannot run here, if so."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    triton, numpy = (
        tuple(int(part) for part in version(name).split(".")[:2]) for name in ("triton", "numpy")
    )
    if triton < (3, 7) and numpy >= (2, 4):
        return f"the interpreter of triton {version('triton')} fails with numpy 2.4 and newer"
    return None


def interpreted(program: Path, *, timeout_s: float = 110) -> Any:
    """What `program` prints, as JSON. Raises AssertionError with its stderr when it fails."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
