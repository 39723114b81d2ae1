"""`kvbraid bench NAME`: run benchmarks/NAME.py of the source tree."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import kvbraid
from kvbraid.errors import NotFoundError

BENCHMARKS = Path(kvbraid.__file__).parent.parent / "benchmarks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", help="Benchmark: a file of benchmarks/ without .py")
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, help="The benchmark's own options, such as --json PATH"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run it and return its exit code. Raises NotFoundError listing those that exist."""
    programs = [p.stem for p in BENCHMARKS.glob("*.py") if "__main__" in p.read_text()]
    if arguments.name not in programs:
        names = ", ".join(sorted(programs)) or "none"
        raise NotFoundError(f"no benchmark {arguments.name!r} in {BENCHMARKS}; there are: {names}")
    # As a module: run by its path, benchmarks/attention.py would hide the package of that name. The
    # source tree is on the path of the interpreter that runs this command.
    command = [sys.executable, "-m", f"benchmarks.{arguments.name}", *arguments.rest]
    return subprocess.run(command, check=False).returncode
