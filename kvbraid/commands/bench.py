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
    script = BENCHMARKS / f"{arguments.name}.py"
    if not script.is_file():
        names = ", ".join(sorted(p.stem for p in BENCHMARKS.glob("*.py"))) or "none"
        raise NotFoundError(f"no benchmark {arguments.name!r} in {BENCHMARKS}; there are: {names}")
    return subprocess.run([sys.executable, str(script), *arguments.rest], check=False).returncode
