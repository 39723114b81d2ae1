"""Who is woken by an alert finds its section."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.observability.rules.alerts import ALERTS
from deploy.observability.rules.rule import Alert
from deploy.observability.rules.slo import DEFAULT_RUNBOOK_URL

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
SECTIONS = {
    title.strip(): text
    for title, text in (part.split("\n", 1) for part in re.split(r"^### ", PAGE, flags=re.M)[1:])
}
NAMES = [rule.name for rule in ALERTS.rules if isinstance(rule, Alert)]


def anchor(title: str) -> str:
    """As GitHub and mkdocs make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 15


@pytest.mark.parametrize("rule", [r for r in ALERTS.rules if isinstance(r, Alert)], ids=NAMES)
def test_an_alert_has_a_section_that_its_link_leads_to(rule: Alert) -> None:
    assert rule.name in SECTIONS
    assert anchor(rule.name) == rule.fragment
    for part in ("**Means**", "**Look**", "**Do**"):
        assert part in SECTIONS[rule.name], f"{rule.name}: {part} is missing"


def test_no_section_is_of_an_alert_that_is_gone() -> None:
    assert sorted(title for title in SECTIONS if title.startswith("KVBraid")) == sorted(NAMES)


def test_the_link_leads_to_this_page() -> None:
    assert DEFAULT_RUNBOOK_URL.endswith("docs/runbook.md")
