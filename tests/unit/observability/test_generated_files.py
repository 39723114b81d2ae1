"""What is committed is what the code writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.observability.files import dashboard_files, rule_files
from tools.metrics_reference import PAGE, page

ROOT = Path(__file__).resolve().parents[3]
AGAIN = "run `python -m deploy.observability`"


def test_rules_are_what_the_code_writes() -> None:
    for name, text in rule_files().items():
        assert (ROOT / name).read_text(encoding="utf-8") == text, f"{name}: {AGAIN}"


def test_dashboards_are_what_the_code_writes() -> None:
    pytest.importorskip(
        "grafana_foundation_sdk",
        reason="NOT CHECKED: pip install -e '.[observability]' compares the committed dashboards",
    )
    for name, text in dashboard_files().items():
        assert (ROOT / name).read_text(encoding="utf-8") == text, f"{name}: {AGAIN}"


def test_nothing_else_lies_among_the_generated_files() -> None:
    alerts = ROOT / "deploy/helm/kvbraid/files/alerts"
    plain = ROOT / "deploy/observability/prometheus"
    found = {p.relative_to(ROOT).as_posix() for folder in (alerts, plain) for p in folder.iterdir()}
    assert found == set(rule_files())


def test_the_metrics_page_is_what_the_code_declares() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tools.metrics_reference`"
