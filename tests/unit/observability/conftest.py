from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tools.fetch_prometheus import installed

Promtool = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def promtool() -> Promtool:
    """Runs promtool with arguments, and text on its standard input."""
    binary = installed("promtool")
    if binary is None:
        pytest.skip("NOT CHECKED: promtool is missing (python -m tools.fetch_prometheus)")

    def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [binary, *arguments], input=text, capture_output=True, text=True, check=False
        )

    return run
