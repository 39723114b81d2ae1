"""Experts of a GPU: the kernel in Triton's interpreter, and who gets them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvbraid.model.grouped_experts import can_group_experts
from tools.triton_interpreter import interpreted, interpreter_obstacle

OBSTACLE = interpreter_obstacle()


@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
def test_two_launches_compute_what_one_expert_after_the_other_does() -> None:
    results = interpreted(Path(__file__).with_name("grouped_experts_cases.py"))
    assert len(results) == 9
    for result in results:
        assert result["error"] <= (1e-3 if "float16" in result["case"] else 1e-6), result


def test_cpus_keep_the_list_of_experts() -> None:
    assert not can_group_experts(torch.device("cpu"))
