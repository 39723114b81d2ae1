"""The triton kernels on CPU, in Triton's interpreter, against the float64 reference."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


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


def interpreted(program: str) -> list[dict[str, Any]]:
    """What a program of this folder prints."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / program)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def test_kernels_equal_the_reference() -> None:
    """Striped over 2 and 3 ranks; foreign rows, stale tails and the window's rows are NaN."""
    results = interpreted("triton_interpreted_cases.py")
    assert len(results) >= 10
    for result in results:
        is_narrow = result["dtype"] == "float16"
        limit, lse_limit = (5e-3, 2e-3) if is_narrow else (1e-5, 1e-4)
        assert result["error"] <= limit, result
        assert result["lse_error"] <= lse_limit, result
        assert result["empties_are_empty"], result


def test_buffers_hold_the_step_that_was_planned_last() -> None:
    """Short after long, long after short, only padding, and two sizes in turn."""
    results = interpreted("triton_buffers_cases.py")
    assert len(results) >= 5
    for result in results:
        assert max(result["errors"]) <= 1e-5, result
