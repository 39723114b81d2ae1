"""Ranks on GPUs against transformers on the same GPU: float32 tokens, bfloat16 logits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]

ROOT = Path(__file__).parents[2]


def test_the_fidelity_bars_hold_for_tiny_mla(tmp_path: Path) -> None:
    # A process of its own: the ranks are spawned beside one that holds the reference models.
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.gpu_fidelity"),
            *("--model", "tests/assets/tiny-mla"),
            *("--prompts", "tests/assets/reference/tiny-mla-greedy.jsonl"),
            *("--json", str(tmp_path / "rows.json")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode in (0, 1), done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) >= 6
    assert [row["case"] for row in rows if not row["holds"]] == []
