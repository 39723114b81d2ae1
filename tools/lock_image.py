"""Writes the lock files of deploy/docker out of pyproject.toml, with `uv pip compile`.

    python -m tools.lock_image            # every package to its newest allowed version

requirements.lock has what every platform needs but torch, cuda-requirements.lock torch's CUDA build
with what it brings, build-requirements.lock what makes the wheel. Every file has a hash for every
archive, so what is installed is what was locked.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIRECTORY = ROOT / "deploy" / "docker"
# The platform's own build of torch, and what only its CUDA build brings.
PLATFORM_PACKAGES = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)$")

_HEADER = "# Generated from pyproject.toml by `make lock-image`. Do not edit.\n"
# Ours besides what pyproject.toml asks for: `kvbraid model pull` runs pip.
_ADDITIONAL = ("pip",)
_OPTIONS = ["--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--quiet"]
_PLATFORM = ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_34"]

Entry = tuple[str, str]


def compile_lock(requirements: Sequence[str]) -> list[Entry]:
    """(name, text with hashes) of all that `requirements` need. Raises CalledProcessError."""
    result = subprocess.run(
        ["uv", "pip", "compile", "-", *_OPTIONS, *_PLATFORM],
        input="\n".join(requirements),
        cwd=DIRECTORY,  # not the root, whose pyproject.toml could have settings for uv
        check=True,
        capture_output=True,
        text=True,
    )
    return entries(result.stdout)


def entries(text: str) -> list[Entry]:
    """The entries of a lock file: name, and the lines that belong to it."""
    parts = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)
    return [(part.split("==")[0], part) for part in parts if "==" in part.split("\n")[0]]


def main() -> int:
    """Write the three files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *extras["cuda"], *_ADDITIONAL]
    found = compile_lock(wanted)
    own = [entry for entry in found if not PLATFORM_PACKAGES.match(entry[0])]
    platform = [entry for entry in found if PLATFORM_PACKAGES.match(entry[0])]
    _write("requirements.lock", own)
    _write("cuda-requirements.lock", platform)
    _write("build-requirements.lock", compile_lock(project["build-system"]["requires"]))
    return 0


def _write(name: str, found: Sequence[Entry]) -> None:
    (DIRECTORY / name).write_text(_HEADER + "".join(text for _, text in found), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
