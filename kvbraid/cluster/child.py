"""One service process: started, waited for until it serves, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvbraid.errors import UnavailableError
from kvbraid.rpc.ready import ReadyReport, read_ready

_LOG_TAIL_LINES = 12


class ChildError(UnavailableError):
    """A service process ended although nobody asked it to."""


class Child:
    """A service in a process group of its own, so that a terminal's Ctrl-C spares it.

    Not in a session of its own: Linux gives each session an equal share of the cores, and a
    coordinator would wait for workers' computing threads however nice these are.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        directory: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start `command` with flags for its ready file and parent; both files in `directory`.

        environment: None: this process's.
        """
        self.name = name
        self.log_path = directory / f"{name}.log"
        self._ready_path = directory / f"{name}.ready"
        self._ready_path.unlink(missing_ok=True)
        own = (f"--ready-file={self._ready_path}", f"--parent-pid={os.getpid()}")
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *own],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                env=environment,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        return self._process.poll()

    def ready(self) -> ReadyReport | None:
        """Where it serves; None before it does. Raises ChildError when it has ended instead."""
        self.check()
        return read_ready(self._ready_path)

    def check(self) -> None:
        """Raise ChildError with exit code and the end of the log when it has ended."""
        code = self._process.poll()
        if code is not None:
            raise ChildError(f"{self.name} (pid {self.pid}) {_ending(code)}\n{self._log_tail()}")

    def terminate(self) -> None:
        """Ask it to drain and end."""
        if self.is_running:
            self._process.terminate()

    def wait(self, seconds: float) -> bool:
        """Whether it ended within `seconds`."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it and its ranks at once; returns when it is gone."""
        if self.is_running:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
