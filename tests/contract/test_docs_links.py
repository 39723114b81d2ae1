"""Links of the documentation lead somewhere: pages, anchors, files of the tree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
TOP = (
    "attention",
    "benchmarks",
    "coordinator",
    "deploy",
    "docs",
    "examples",
    "kvbraid",
    "protos",
    "tests",
    "tools",
)
TREE_PATH = re.compile(rf"`((?:{'|'.join(TOP)})/[\w./*-]+)`")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> Iterator[str]:
    for target in LINK.findall(re.sub(r"`[^`]*`", "", prose(page))):
        if not target.startswith(("http://", "https://", "mailto:")):
            yield target


def anchors(page: Path) -> set[str]:
    """Ids of the headings, as Markdown's toc extension makes them and GitHub too."""
    found: set[str] = set()
    for text in HEADING.findall(prose(page)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "")
        slug = re.sub(r"[^\w\s-]", "", plain).strip().lower()
        found |= {re.sub(r"[-\s]+", "-", slug), slug.replace(" ", "-")}
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{name_of(page)}: {target}"
        assert goal.is_relative_to(ROOT), f"{name_of(page)}: {target}"
        if anchor:
            assert anchor in anchors(goal), f"{name_of(page)}: {target}"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=name_of)
def test_links_of_the_site_stay_inside_it(page: Path) -> None:
    for target in links(page):
        path = target.partition("#")[0]
        goal = (page.parent / path).resolve() if path else page
        assert goal.is_relative_to(DOCS), f"{name_of(page)}: {target}; name the file in backticks"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_in_the_text_exist(page: Path) -> None:
    for path in TREE_PATH.findall(prose(page)):
        found = list(ROOT.glob(path.rstrip("/"))) if "*" in path else [ROOT / path]
        assert found, f"{name_of(page)}: {path}"
        # A module's name may stand without its suffix.
        real = [item for item in found if item.exists() or item.with_suffix(".py").exists()]
        assert real, f"{name_of(page)}: {path}"


def test_there_are_links_to_check() -> None:
    assert sum(len(list(links(page))) for page in PAGES) > 40
