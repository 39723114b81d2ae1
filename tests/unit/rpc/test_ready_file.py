"""The ready file of a service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODEL = Path(__file__).parents[2] / "assets" / "tiny-mla"


def test_one_that_could_never_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    """And not once the model is loaded."""
    path = tmp_path / "away" / "decode.ready"
    flags = (f"--model={MODEL}", "--decode-workers=127.0.0.1:9", f"--ready-file={path}")
    command = [sys.executable, "-m", "coordinator", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    accepted = "accepted: a file in a folder that exists"
    assert done.stderr == f"kvbraid coordinator: ready_file is {path}, {accepted}\n"
