"""Dashboards, rules and alerts ask only for series that the code declares."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.observability.files import DASHBOARDS
from deploy.observability.rules.alerts import ALERTS
from deploy.observability.rules.recording import RECORDING
from deploy.observability.rules.rule import Alert, Recording
from deploy.observability.rules.slo import SLOS, with_defaults
from tools.metric_catalogue import declared_metrics, selectors

ROOT = Path(__file__).resolve().parents[3]
SERIES = {
    name: (labels, metric)
    for metric in declared_metrics()
    for name, labels in metric.series.items()
}
TARGET_LABELS = {"namespace", "instance", "job"}
RECORDED = {rule.record for rule in RECORDING.rules if isinstance(rule, Recording)}

GROUPED = re.compile(r"\b(?:by|on|without|group_left) \(([^)]*)\)")
LEGEND = re.compile(r"{{(\w+)}}")
ANNOTATED = re.compile(r"\$labels\.(\w+)")
RECORDING_NAME = re.compile(r"kvbraid:[a-z0-9_:]+")


def expressions() -> Iterator[tuple[str, str, str]]:
    """Where it stands, the expression, and the text that shows its labels."""
    for page in DASHBOARDS:
        for panel in page.panels:
            for query in panel.queries:
                yield f"{page.name}/{panel.title}", query.expr, query.legend
    for rule in (*RECORDING.rules, *ALERTS.rules):
        expr = with_defaults(rule.expr)
        if isinstance(rule, Alert):
            yield rule.name, expr, rule.summary
        else:
            yield rule.record, expr, ""


CASES = [pytest.param(*case, id=f"{case[0]}-{i}") for i, case in enumerate(expressions())]


@pytest.mark.parametrize(("where", "expr", "shown"), CASES)
def test_a_query_names_what_exists(where: str, expr: str, shown: str) -> None:
    check_query(expr, shown)


def check_query(expr: str, shown: str = "") -> None:
    """Raises AssertionError for a series, a label or a label value that no metric has."""
    used = [(name, matchers) for name, matchers in selectors(expr) if ":" not in name]
    recorded = RECORDING_NAME.findall(expr)
    assert used or recorded, "asks for nothing"
    assert set(recorded) <= RECORDED
    reachable = set(TARGET_LABELS)
    for name, matchers in used:
        assert name in SERIES, f"{name} is no series"
        labels, metric = SERIES[name]
        reachable |= set(labels)
        for matcher in matchers:
            if matcher.label in TARGET_LABELS:
                continue
            assert matcher.label in labels, f"{name} has no label {matcher.label}"
            check_value(matcher.operator, matcher.value, known_values(metric, matcher.label))
    bare = re.sub(r"\{[^{}]*\}", "", expr)
    for name in re.findall(r"\b(?:kvbraid|process)_[a-z0-9_]+", bare):
        assert name in SERIES, f"{name} is no series"
    for group in GROUPED.findall(bare):
        wanted = {label for label in re.split(r", *", group) if label}
        assert wanted <= reachable | {"le"}, f"{wanted - reachable} not on the series"
    for label in (*LEGEND.findall(shown), *ANNOTATED.findall(shown)):
        assert label in reachable, f"the text shows {label}, which the series lack"


def known_values(metric, label: str) -> tuple[str, ...]:
    if label == "le":
        return tuple(str(bound) for bound in metric.bounds)
    return metric.values.get(label, ())


def check_value(operator: str, value: str, known: tuple[str, ...]) -> None:
    if not known or "$" in value or value == ".+":
        return
    if label_is_role(known):
        known = ("coordinator", "prefill", "decode", "draft")
    if operator in ("=", "!="):
        assert value in known, f"{value} is none of {known}"
        return
    for alternative in value.split("|"):
        assert any(re.fullmatch(alternative, v) for v in known), f"{alternative}: none of {known}"


def label_is_role(known: tuple[str, ...]) -> bool:
    return set(known) <= {"coordinator", "prefill", "decode", "draft"}


@pytest.mark.parametrize(
    ("expr", "shown"),
    [
        ("sum(rate(kvbraid_engine_nothing_total{}[5m]))", ""),
        ('kvbraid_kv_pages{colour="red"}', ""),
        ('kvbraid_kv_pages{state="red"}', ""),
        ('kvbraid_kv_pages{state=~"active|red"}', ""),
        ("sum by (colour) (kvbraid_kv_pages{})", ""),
        ("kvbraid_kv_pages{}", "{{colour}}"),
        ("kvbraid:nothing:ratio", ""),
        ("vector(1)", ""),
    ],
)
def test_the_check_notices_what_does_not_exist(expr: str, shown: str) -> None:
    with pytest.raises(AssertionError):
        check_query(expr, shown)


def test_every_panel_asks_a_question_and_titles_are_unique() -> None:
    assert len({page.name for page in DASHBOARDS}) == len(DASHBOARDS) >= 5
    for page in DASHBOARDS:
        titles = [panel.title for panel in page.panels]
        assert len(set(titles)) == len(titles) >= 6, page.name
        for panel in page.panels:
            assert "?" in panel.question, f"{page.name}/{panel.title}"
            assert panel.queries, f"{page.name}/{panel.title}"


def test_every_metric_of_ours_is_on_a_dashboard_or_in_a_rule() -> None:
    text = " ".join(expr for _, expr, _ in expressions())
    unused = [
        metric.name
        for metric in declared_metrics()
        if metric.name.startswith("kvbraid_") and not re.search(rf"\b{metric.name}(_\w+)?\b", text)
    ]
    # An error is on the dashboards by its call's code; the client sees in-flight calls as requests.
    assert sorted(set(unused) - UNSHOWN) == []


UNSHOWN = {"kvbraid_rpc_errors_total", "kvbraid_rpc_in_flight_requests"}


def test_thresholds_of_latencies_are_bounds_of_their_histograms() -> None:
    for slo in SLOS:
        if slo.accepted:
            assert slo.default in slo.accepted, slo.key
        assert str(slo) not in with_defaults(str(slo)), slo.key


def test_committed_dashboards_are_importable_and_ask_the_same() -> None:
    folder = ROOT / "deploy/helm/kvbraid/files/dashboards"
    assert sorted(p.stem for p in folder.glob("*.json")) == sorted(d.name for d in DASHBOARDS)
    for page in DASHBOARDS:
        written = json.loads((folder / f"{page.name}.json").read_text(encoding="utf-8"))
        panels = [panel for panel in written["panels"] if panel["type"] != "row"]
        asked = [[target["expr"] for target in panel["targets"]] for panel in panels]
        assert asked == [[query.expr for query in panel.queries] for panel in page.panels]
        assert written["uid"] == f"kvbraid-{page.name}"
        ids = [panel["id"] for panel in written["panels"]]
        assert len(set(ids)) == len(ids)
        for panel in panels:
            assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
