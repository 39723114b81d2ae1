"""Every command of the documentation is run, in the order of its page, as its reader would.

Pages run against a small model under the name that they use; the quickstart also, slowly, against
the model itself. Fixed ports become free ones and /tmp/ a folder of the test.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tools.docs_blocks import Block, PageSession, command_blocks

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
MODEL_NAME = "smollm2-135m-instruct"
SMALL_MODEL = ROOT / "tests" / "assets" / "tiny-mla"
FIXED_PORTS = re.compile(r"\b(50051|50052|50053|8000|9102)\b")
RUNNABLE = [page for page in PAGES if any(not block.not_run for block in command_blocks(page))]
# What a reader does on their own machine, and how much of it may be left out.
MAX_NOT_RUN = {"quickstart.md": 1, "operations.md": 0, "index.md": 0}
NEWCOMER_S = 300.0


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def environment(scratch: Path, models: Path) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("KVBRAID_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return {**kept, "PATH": path, "KVBRAID_MODELS": str(models), "TMPDIR": str(scratch)}


def run_page(page: Path, scratch: Path, models: Path, *, timeout_s: float) -> None:
    ports: dict[str, str] = {}
    with (
        ExitStack() as reserved,
        PageSession(ROOT, scratch, environment(scratch, models), timeout_s=timeout_s) as session,
    ):
        for block in command_blocks(page):
            for port in FIXED_PORTS.findall(block.script):
                if port not in ports:
                    ports[port] = free_port(reserved)
        reserved.close()
        for block in command_blocks(page):
            if not block.not_run:
                session.run(placed(block, ports, scratch))


def free_port(reserved: ExitStack) -> str:
    """Held until all are chosen, so that no two are the same."""
    listener = reserved.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    return str(listener.getsockname()[1])


def placed(block: Block, ports: dict[str, str], scratch: Path) -> Block:
    script = FIXED_PORTS.sub(lambda match: ports[match[0]], block.script)
    return replace(block, script=script.replace("/tmp/", f"{scratch}/"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / MODEL_NAME).symlink_to(SMALL_MODEL)
    run_page(page, tmp_path, models, timeout_s=120)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_newcomer_gets_an_answer_in_under_five_minutes(tmp_path: Path) -> None:
    """With the real model, fetched; after `make setup`, which the test's environment stands for."""
    started = time.monotonic()
    run_page(DOCS / "quickstart.md", tmp_path, tmp_path / "models", timeout_s=NEWCOMER_S)
    assert time.monotonic() - started < NEWCOMER_S


def test_commands_that_are_not_run_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    by_page = {name_of(page): command_blocks(page) for page in PAGES}
    for name, limit in MAX_NOT_RUN.items():
        assert sum(bool(block.not_run) for block in by_page[name]) <= limit, name
    reasons = Counter(block.not_run or "run" for blocks in by_page.values() for block in blocks)
    with capsys.disabled():
        counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items()))
        sys.stdout.write(f"\nblocks of commands: {counts}\n")
    assert reasons["run"] >= 12


def test_commands_are_marked_as_such() -> None:
    """A fence without a language, or with another shell's name, would hide its commands."""
    command = re.compile(r"^ *(\$ )?(kvbraid|make|helm|kubectl|docker|curl|pip) ", re.MULTILINE)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for language, body in re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", text, re.M | re.S):
            if language not in ("bash", "console"):
                assert not command.search(body), f"{name_of(page)}: {body}"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_there_are_pages_to_run() -> None:
    assert {"quickstart.md", "operations.md"} <= set(map(name_of, RUNNABLE))
