"""The triton kernels on CPU, in Triton's interpreter, against the float64 reference."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("triton_interpreted_cases.py")
ROOT = Path(__file__).resolve().parents[3]


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


OBSTACLE = interpreter_obstacle()
pytestmark = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))


def test_kernels_equal_the_reference() -> None:
    """Striped over 2 and 3 ranks; foreign rows, stale tails and the window's rows are NaN."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) >= 10
    for result in results:
        limit, lse_limit = (1e-5, 1e-4) if result["dtype"] == "float32" else (5e-3, 2e-3)
        assert result["error"] <= limit, result
        assert result["lse_error"] <= lse_limit, result
        assert result["empties_are_empty"], result
