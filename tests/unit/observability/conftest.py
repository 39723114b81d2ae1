from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import pytest

Promtool = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def promtool() -> Promtool:
    """Runs promtool with arguments, and text on its standard input."""
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("NOT CHECKED: promtool is missing (apt-get install prometheus)")

    def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [binary, *arguments], input=text, capture_output=True, text=True, check=False
        )

    return run
