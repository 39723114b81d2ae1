"""The triton kernels on CPU, in Triton's interpreter, against the float64 reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.triton_interpreter import interpreted, interpreter_obstacle

HERE = Path(__file__).parent
OBSTACLE = interpreter_obstacle()
pytestmark = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))


def test_kernels_equal_the_reference() -> None:
    """Striped over 2 and 3 ranks; foreign rows, stale tails and the window's rows are NaN."""
    results = interpreted(HERE / "triton_interpreted_cases.py")
    assert len(results) >= 10
    for result in results:
        is_narrow = result["dtype"] == "float16"
        limit, lse_limit = (5e-3, 2e-3) if is_narrow else (1e-5, 1e-4)
        assert result["error"] <= limit, result
        assert result["lse_error"] <= lse_limit, result
        assert result["empties_are_empty"], result


def test_buffers_hold_the_step_that_was_planned_last() -> None:
    """Short after long, long after short, only padding, and two sizes in turn."""
    results = interpreted(HERE / "triton_buffers_cases.py")
    assert len(results) >= 5
    for result in results:
        assert max(result["errors"]) <= 1e-5, result
