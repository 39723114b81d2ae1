"""Both supported major versions of helm take the chart and render the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbraid import __version__
from tests.deploy.charts import CHART, EXAMPLES, HELMS, render, run_helm, yaml


@pytest.mark.parametrize(("name", "version"), HELMS.items())
def test_the_versions_are_those_that_are_promised(name: str, version: str) -> None:
    code, out, _ = run_helm(name, "version", "--short")
    assert code == 0
    assert out.startswith(version)


@pytest.mark.parametrize("name", HELMS)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_lint_is_strict(name: str, example: Path) -> None:
    code, out, err = run_helm(name, "lint", "--strict", str(CHART), "--values", str(example))
    assert code == 0, out + err


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_both_render_the_same(example: Path) -> None:
    assert render(example, name="helm3") == render(example, name="helm4")


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == __version__
    assert chart["version"] == __version__
