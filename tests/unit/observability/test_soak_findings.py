"""What a soak calls growth and what it calls an error."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tools.process_growth import Growth, family
from tools.soak import errors_in


def test_files_that_stay_open_are_growth_and_those_of_a_moment_are_not() -> None:
    growth = Growth({"this": os.getpid()})
    with Path(os.devnull).open():
        growth.take()
    for _ in range(8):
        growth.take()
    assert growth.per_hour("this", "num_fds") == 0
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(Path(os.devnull).open())
        for _ in range(9):
            growth.take()
        assert growth.last("this", "num_fds") >= 5
    assert growth.per_hour("this", "num_fds") > 0
    assert growth.last("this", "rss_mib") > 1


def test_children_of_a_process_are_sampled_too() -> None:
    wait = [sys.executable, "-c", "input()"]
    with subprocess.Popen(wait, stdin=subprocess.PIPE) as child:
        assert child.pid in family(os.getpid())
        growth = Growth({"this": os.getpid()})
        assert growth.names[0] == "this"
        assert len(growth.names) >= 2
        growth.take()
        child.communicate(b"\n")


def test_records_of_level_error_and_tracebacks_are_errors(tmp_path: Path) -> None:
    lines = (
        '{"level": "info", "message": "error: none"}',
        "[7] a number is JSON too",
        "3",
        '{"level": "error", "message": "lost"}',
        "Traceback (most recent call last):",
        '{"level": "critical", "message": "gone"}',
    )
    (tmp_path / "decode-0.log").write_text("\n".join(lines))
    assert [error.partition(": ")[2] for error in errors_in(tmp_path)] == [*lines[3:]]
