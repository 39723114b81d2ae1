"""The site builds without a warning, and its generated pages are what the code says."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvbraid.cli import SERVICES
from tools.gen_docs import reference_pages

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SNAKE = re.compile(r"`([a-z]+(?:_[a-z]+)+)`")
GUIDES = sorted(
    page.relative_to(DOCS).as_posix()
    for folder in (DOCS, DOCS / "concepts")
    for page in folder.glob("*.md")
    if page.name not in ("architecture.md", "attention.md", "glossary.md", "metrics.md")
)
SETTING = re.compile(r"^    (\w+): .+ = setting\(", re.MULTILINE)


@pytest.fixture(scope="module")
def fresh() -> dict[str, str]:
    return reference_pages()


def test_generated_pages_are_what_the_generator_writes(fresh: dict[str, str]) -> None:
    committed = {name: (DOCS / name).read_text(encoding="utf-8") for name in fresh}
    stale = [name for name, text in fresh.items() if committed[name] != text]
    assert not stale, "run `make gen-docs`"


def test_every_setting_of_every_role_is_on_the_page(fresh: dict[str, str]) -> None:
    page = fresh["reference/configuration.md"]
    sources = [ROOT / "kvbraid" / "settings" / "sections.py"]
    sources += [ROOT / module / "config.py" for module in SERVICES.values()]
    names = {
        name for source in sources for name in SETTING.findall(source.read_text(encoding="utf-8"))
    }
    assert len(names) > 40
    assert [name for name in sorted(names) if f"\n| `{name}` |" not in page] == []
    for role in SERVICES:
        assert f"`{role}`" in page


def test_every_message_and_call_is_on_the_page(fresh: dict[str, str]) -> None:
    page = fresh["reference/grpc.md"]
    for path in (ROOT / "protos").rglob("*.proto"):
        for line in path.read_text(encoding="utf-8").splitlines():
            match line.split():
                case ["message" | "service" | "enum", name, *_]:
                    assert f"\n### {name}\n" in page, name
                case ["rpc", call, *_]:
                    assert f"| `{call.partition('(')[0]}` |" in page, call


def test_figures_of_the_text_are_those_of_the_table(fresh: dict[str, str]) -> None:
    table, text = fresh["reference/kv-capacity.md"], (DOCS / "operations.md").read_text()
    for figure in ("8,784", "70,272"):
        assert figure in table
        assert figure in text


@pytest.mark.parametrize("name", GUIDES)
def test_names_in_the_text_are_names_of_the_code(name: str, fresh: dict[str, str]) -> None:
    """A setting or field that was renamed must not stay in a guide under its old name."""
    known = "".join(fresh.values()) + (DOCS / "metrics.md").read_text(encoding="utf-8")
    known += (ROOT / "deploy" / "helm" / "kvbraid" / "values.yaml").read_text(encoding="utf-8")
    known += (ROOT / "kvbraid" / "kv" / "handoff.py").read_text(encoding="utf-8")
    names = set(SNAKE.findall((DOCS / name).read_text(encoding="utf-8")))
    assert [word for word in sorted(names) if not re.search(rf"\b{word}\b", known)] == []


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install -e '.[docs]'")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "site" / "concepts" / "striping.html").read_text(encoding="utf-8")
    assert '<pre class="mermaid">' in page
