"""The commands in documentation pages: which there are, and running them as a reader would.

Fences that begin with ```bash or ```console are commands (of console, the lines after "$ "). A
comment on the line before the fence says what is special about it:

    <!-- not run: REASON -->        cannot run in a test; REASON is one of NOT_RUN_REASONS
    <!-- background: REGEX -->      runs until the page is done; ready once its output has REGEX
    <!-- output: REGEX -->          its output must have REGEX

Each block has a shell of its own, so a page must not lean on variables of an earlier block.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

NOT_RUN_REASONS = frozenset(
    {
        "needs a Kubernetes cluster",
        "needs a container engine",
        "needs a GPU",
        "needs a Prometheus server",
        "needs several hosts",
        "sets up this machine, as the test's own did",
    }
)

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n`]*$")
_MARKER = re.compile(r"^ *<!-- (?P<kind>not run|background|output): (?P<value>.*) -->$")
_POLL_S = 0.05


class DocsBlockError(AssertionError):
    """A block failed or is marked in a way nobody understands; the message has page and line."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block of commands. `line` is that of its fence."""

    page: Path
    line: int
    script: str
    not_run: str = ""
    background: str = ""
    output: str = ""

    @property
    def place(self) -> str:
        """For messages: page:line."""
        return f"{self.page.name}:{self.line}"


def command_blocks(page: Path) -> list[Block]:
    """The blocks of `page`, in order. Raises DocsBlockError for an unknown reason."""
    blocks = list(_blocks(page))
    for block in blocks:
        if block.not_run and block.not_run not in NOT_RUN_REASONS:
            accepted = "; ".join(sorted(NOT_RUN_REASONS))
            raise DocsBlockError(f"{block.place}: not run: {block.not_run!r}, accepted: {accepted}")
    return blocks


def _blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    start, language = 0, ""
    for number, line in enumerate(lines, start=1):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if not start:
            start, language = number, fence["language"]
            continue
        if language in ("bash", "console"):
            script = _script(lines[start : number - 1], language)
            yield Block(page, start, script, **_marks(lines, start))
        start = 0
    if start:
        raise DocsBlockError(f"{page.name}:{start}: the fence is never closed")


def _script(lines: list[str], language: str) -> str:
    if language == "console":
        lines = [line.strip()[2:] for line in lines if line.strip().startswith("$ ")]
    return "\n".join(lines) + "\n"


def _marks(lines: list[str], fence: int) -> dict[str, str]:
    """The markers on the lines right above the fence, by field name."""
    marks: dict[str, str] = {}
    for line in reversed(lines[: fence - 1]):
        marker = _MARKER.match(line)
        if marker is None:
            break
        marks[marker["kind"].replace(" ", "_")] = marker["value"]
    return marks


class PageSession:
    """Runs the blocks of one page, each in a shell of its own. Ends what is left running."""

    def __init__(
        self, directory: Path, scratch: Path, environment: Mapping[str, str], *, timeout_s: float
    ) -> None:
        """directory: where the reader stands. scratch: for logs. timeout_s: of each block."""
        self._directory = directory
        self._scratch = scratch
        self._environment = dict(environment)
        self._timeout_s = timeout_s
        self._background: list[tuple[Block, subprocess.Popen[bytes]]] = []

    def run(self, block: Block) -> str:
        """Run `block` and return its output. Raises DocsBlockError when it fails."""
        process = self._spawn(block)
        if block.background:
            self._background.append((block, process))
            return self._wait_ready(block, process)
        code = self._wait(process)
        text = self._log(block)
        if code != 0:
            how = f"exit code {code}" if code is not None else f"not done in {self._timeout_s} s"
            raise DocsBlockError(f"{block.place}: {how}\n{block.script}\n{text}")
        if block.output and not re.search(block.output, text):
            raise DocsBlockError(f"{block.place}: no {block.output!r} in its output:\n{text}")
        return text

    def stop(self) -> None:
        """Ctrl-C to what runs in the background, newest first; each must end with code 0."""
        failed = []
        while self._background:
            block, process = self._background.pop()
            process.send_signal(signal.SIGINT)
            code = self._wait(process)
            if code != 0:
                failed.append(f"{block.place}: {code} after Ctrl-C\n{self._log(block)}")
        if failed:
            raise DocsBlockError("\n".join(failed))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            self.stop()
        for _, process in self._background:
            process.send_signal(signal.SIGINT)
            self._wait(process)

    def _spawn(self, block: Block) -> subprocess.Popen[bytes]:
        # A background block is one command; without exec, Ctrl-C would reach the shell alone.
        script = f"exec {block.script.strip()}" if block.background else block.script
        with self._log_path(block).open("wb") as sink:
            return subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", script],
                cwd=self._directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )

    def _wait_ready(self, block: Block, process: subprocess.Popen[bytes]) -> str:
        give_up = time.monotonic() + self._timeout_s
        while not re.search(block.background, self._log(block)):
            if process.poll() is not None or time.monotonic() > give_up:
                text = self._log(block)
                raise DocsBlockError(f"{block.place}: no {block.background!r} in\n{text}")
            time.sleep(_POLL_S)
        return self._log(block)

    def _wait(self, process: subprocess.Popen[bytes]) -> int | None:
        """Its exit code; None when its time was up and it was killed."""
        try:
            return process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None

    def _log_path(self, block: Block) -> Path:
        return self._scratch / f"{block.page.stem}-{block.line}.log"

    def _log(self, block: Block) -> str:
        return self._log_path(block).read_text(encoding="utf-8", errors="replace")
