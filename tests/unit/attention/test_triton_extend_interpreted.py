"""The triton extend kernel on CPU, in Triton's interpreter, against the float64 reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.triton_interpreter import interpreted, interpreter_obstacle

PROGRAM = Path(__file__).with_name("triton_extend_interpreted_cases.py")
OBSTACLE = interpreter_obstacle()
pytestmark = [
    pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE)),
    # 15 seconds of CPU, which a busy machine spreads over many more.
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def report() -> dict:
    return interpreted(PROGRAM, timeout_s=280)


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
