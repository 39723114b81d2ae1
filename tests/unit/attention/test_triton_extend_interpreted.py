"""The triton extend kernel on CPU, in Triton's interpreter, against the float64 reference."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("triton_extend_interpreted_cases.py")
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
pytestmark = [
    pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE)),
    # 15 seconds of CPU, which a busy machine spreads over many more.
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def report() -> dict:
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
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_rows_equal_the_reference_and_the_torch_backend(report: dict) -> None:
    """Needles, uneven groups, cut prefixes and expansions; rows that must not be read are NaN."""
    assert len(report["cases"]) >= 14
    for case in report["cases"]:
        limit = 1e-5 if case["dtype"] == "float32" else 5e-3
        assert case["error"] <= limit, case
        assert case["torch_difference"] <= 2 * limit, case


def test_damaged_keys_are_seen_by_their_own_sequence_only(report: dict) -> None:
    stays = [case["damage_stays"] for case in report["cases"]]
    assert False not in stays
    assert stays.count(True) == 4


def test_deterministic_results_do_not_depend_on_the_batch(report: dict) -> None:
    assert report["is_deterministic"]


def test_no_tokens_or_no_heads_give_an_empty_result(report: dict) -> None:
    assert report["empties_are_empty"]
