"""The image's lock files against pyproject.toml and against each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.lock_image import PLATFORM_PACKAGES, entries

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / "deploy" / "docker"
LOCKS = ("requirements.lock", "cuda-requirements.lock", "build-requirements.lock")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def versions(name: str) -> dict[str, str]:
    text = (DIRECTORY / name).read_text(encoding="utf-8")
    return {
        package: entry.split("==")[1].split()[0].rstrip("\\") for package, entry in entries(text)
    }


def unmet(requirements: list[str], locked: dict[str, str]) -> list[str]:
    parsed = [Requirement(text) for text in requirements]
    return [
        str(item)
        for item in parsed
        if (found := locked.get(canonicalize_name(item.name))) is None
        or not item.specifier.contains(found)
    ]


def test_everything_the_project_needs_is_locked_at_a_version_it_accepts() -> None:
    locked = versions("requirements.lock") | versions("cuda-requirements.lock")
    wanted = PROJECT["project"]["dependencies"]
    assert unmet(wanted + PROJECT["project"]["optional-dependencies"]["cuda"], locked) == []


def test_what_makes_the_wheel_is_locked_and_is_not_in_the_image() -> None:
    build = versions("build-requirements.lock")
    assert unmet(PROJECT["build-system"]["requires"], build) == []
    assert "hatchling" not in versions("requirements.lock") | versions("cuda-requirements.lock")


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_has_hashes_and_nothing_names_an_index(name: str) -> None:
    text = (DIRECTORY / name).read_text(encoding="utf-8")
    for package, entry in entries(text):
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), package
    assert "://" not in text
    assert "index" not in text


def test_torch_and_what_its_cuda_build_brings_are_apart_from_the_rest() -> None:
    for package in versions("requirements.lock"):
        assert not PLATFORM_PACKAGES.match(package), package
    assert "torch" in versions("cuda-requirements.lock")


def test_an_entry_ends_where_the_next_begins() -> None:
    hashes = "".join(f" \\\n    --hash=sha256:{digit * 64}" for digit in "01")
    text = f"# head\na==1.0{hashes}\nb-c==2.0{hashes}\n"
    assert entries(text) == [("a", f"a==1.0{hashes}\n"), ("b-c", f"b-c==2.0{hashes}\n")]
