"""The Triton row mover on CPU, in Triton's interpreter: whole pools, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.triton_interpreter import interpreted, interpreter_obstacle

PROGRAM = Path(__file__).with_name("row_mover_cases.py")
OBSTACLE = interpreter_obstacle()
pytestmark = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    return interpreted(PROGRAM)


def test_appended_rows_are_the_ranks_own_and_nothing_else_changes(answer: dict[str, Any]) -> None:
    """Foreign source rows are NaN; the pool's other bytes must stay as they were."""
    assert len(answer["append"]) >= 40
    for case, result in answer["append"].items():
        assert result["each_token_once"], case
        assert result["untouched"], case
        assert result["error"] <= 1, (case, result)


def test_the_kernel_stores_what_torch_stores_bit_for_bit(answer: dict[str, Any]) -> None:
    different = [case for case, result in answer["append"].items() if not result["same_as_torch"]]
    assert different == []


def test_slots_may_be_int32(answer: dict[str, Any]) -> None:
    assert answer["int32"]["same_as_torch"]


def test_ids_that_were_filtered_before_end_up_elsewhere(answer: dict[str, Any]) -> None:
    """dcp.md bug 25: of rows 8..11 passed as slots, rank 1 of 4 keeps one, in row 2."""
    assert answer["twice_filtered"] == [2]


def test_negative_slots_are_written_by_no_rank(answer: dict[str, Any]) -> None:
    assert answer["negative_slots"]


def test_rows_survive_a_handoff_between_other_layouts(answer: dict[str, Any]) -> None:
    for case, result in answer["moves"].items():
        assert result == {"same_as_torch": True, "untouched": True, "arrived": True}, case
