"""docs/architecture.md names the functions of a request's life; they must exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
LIFE = PAGE.split("## 2. ")[1].split("## 3. ")[0]
NAMES = re.findall(r"`([\w/]+)\.py: ([\w.]+)`", LIFE)


def test_the_life_of_a_request_is_told_with_names() -> None:
    assert len(NAMES) >= 12
    told = {path.split("/")[0] for path, _ in NAMES}
    assert told >= {"coordinator", "prefill_service", "decode_service", "kvbraid", "attention"}


@pytest.mark.parametrize(("path", "name"), NAMES)
def test_a_name_on_the_page_exists(path: str, name: str) -> None:
    assert (ROOT / f"{path}.py").is_file(), path
    found = importlib.import_module(path.replace("/", "."))
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)


def test_folders_on_the_page_exist() -> None:
    tree = PAGE.split("```")[1]
    for line in tree.splitlines():
        name = line.split()[0] if line[:1].strip() else ""
        if name.endswith("/"):
            assert (ROOT / name).is_dir(), name
