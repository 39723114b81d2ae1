"""Commands are found, marked and run as the page says; what fails is told with its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.docs_blocks import DocsBlockError, PageSession, command_blocks

PAGE = """
# Title

```bash
echo one
echo two
```

```text
kvbraid not a command
```

<!-- output: th?ree -->
```console
$ echo three
three
$ echo four
```

1. In a list:

   <!-- not run: needs a GPU -->
   ```bash
   nvidia-smi
   ```

<!-- background: up -->
```bash
sh -c 'trap "exit 0" INT; echo up; while :; do sleep 0.05; done'
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def session(scratch: Path, timeout_s: float = 20) -> PageSession:
    return PageSession(scratch, scratch, os.environ, timeout_s=timeout_s)


def test_blocks_are_found_with_their_marks(page: Path) -> None:
    first, second, third, fourth = command_blocks(page)
    assert first.script == "echo one\necho two\n"
    assert (second.script, second.output) == ("echo three\necho four\n", "th?ree")
    assert (third.not_run, third.place) == ("needs a GPU", "page.md:23")
    assert fourth.background == "up"


def test_blocks_run_and_background_ends_with_the_page(page: Path, tmp_path: Path) -> None:
    first, second, _, fourth = command_blocks(page)
    with session(tmp_path) as running:
        assert running.run(first) == "one\ntwo\n"
        assert running.run(second) == "three\nfour\n"
        assert running.run(fourth) == "up\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```bash\necho said; false\n```", r"page\.md:1: exit code 1"),
        ("```bash\nfalse | true\n```", "exit code 1"),
        ("```bash\necho $unknown\n```", "exit code 1"),
        ("<!-- output: no -->\n```bash\necho yes\n```", "no 'no' in its output"),
        ("<!-- background: up -->\n```bash\nsh -c 'echo down'\n```", "no 'up' in"),
        ("```bash\nsleep 60\n```", "not done in"),
    ],
)
def test_a_block_that_fails_is_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "page.md"
    path.write_text(text)
    (block,) = command_blocks(path)
    timeout_s = 0.3 if "sleep" in text else 20
    with session(tmp_path, timeout_s) as running, pytest.raises(DocsBlockError, match=message):
        running.run(block)


def test_a_background_command_that_does_not_end_well_is_told(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(
        "<!-- background: up -->\n```bash\n"
        "sh -c 'trap \"exit 3\" INT; echo up; while :; do sleep 0.05; done'\n```"
    )
    (block,) = command_blocks(path)
    with pytest.raises(DocsBlockError, match="3 after Ctrl-C"), session(tmp_path) as running:
        running.run(block)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- not run: too slow -->\n```bash\ntrue\n```", "accepted: needs"),
        ("```bash\ntrue\n", "never closed"),
    ],
)
def test_a_page_that_is_written_wrong_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(DocsBlockError, match=message):
        command_blocks(path)
