"""Rules in promtool: they parse, every alert fires when it should and keeps silent otherwise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deploy.observability.files import DASHBOARDS
from deploy.observability.rules.alerts import ALERTS
from deploy.observability.rules.recording import RECORDING
from deploy.observability.rules.rule import Alert, Recording, RuleGroup
from deploy.observability.rules.slo import DEFAULT_RUNBOOK_URL, with_defaults
from tests.unit.observability.alert_cases import CASES, AlertCase, Series

ROOT = Path(__file__).resolve().parents[3]
PLAIN = ROOT / "deploy/observability/prometheus"
RULE_FILES = [str(PLAIN / "recording.yaml"), str(PLAIN / "alerts.yaml")]


def promtool_test(
    series: Series, alert: str, at: str, step: str, num_firing: int
) -> dict[str, Any]:
    """A test group that expects so many firing alerts of a name at a time."""
    firing = f'sum(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
    return {
        "interval": step,
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f"clamp_max({firing}, 1)",
                "eval_time": at,
                "exp_samples": [{"labels": "{}", "value": num_firing}],
            }
        ],
    }


def run_tests(promtool: Any, folder: Path, alert: str, *groups: dict[str, Any]) -> Any:
    """Runs the groups over the alert and what it reads only: all rules would take ten times as
    long."""
    rule = next(r for r in ALERTS.rules if isinstance(r, Alert) and r.name == alert)
    read = tuple(r for r in RECORDING.rules if isinstance(r, Recording) and r.record in rule.expr)
    rules, tests = folder / "rules.yaml", folder / "alerts_test.yaml"
    interval = groups[0]["interval"]
    rules.write_text(with_defaults(RuleGroup("rules", interval, (*read, rule)).to_yaml()))
    tests.write_text(json.dumps({"rule_files": [str(rules)], "tests": groups}))
    return promtool("test", "rules", str(tests))


def test_every_alert_has_a_case() -> None:
    names = [rule.name for rule in ALERTS.rules if isinstance(rule, Alert)]
    assert sorted(case.alert for case in CASES) == sorted(names)


def test_the_files_hold_the_alerts_that_have_cases() -> None:
    placed = ROOT / "deploy/helm/kvbraid/files/alerts/alerts.yaml"
    for path in (PLAIN / "alerts.yaml", placed):
        names = re.findall(r"alert: (\w+)", path.read_text(encoding="utf-8"))
        assert sorted(names) == sorted(case.alert for case in CASES), path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_a_case_keeps_silent_for_its_values_and_not_for_want_of_them(case: AlertCase) -> None:
    fires, silent = ({name.partition("{")[0] for name in s} for s in (case.fires, case.silent))
    assert fires == silent
    assert case.fires != case.silent


def test_rules_parse(promtool: Any) -> None:
    done = promtool("check", "rules", *RULE_FILES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_on_its_fault_and_only_then(
    case: AlertCase, promtool: Any, tmp_path: Path
) -> None:
    fires = promtool_test(case.fires, case.alert, case.at, case.step, 1)
    silent = promtool_test(case.silent, case.alert, case.at, case.step, 0)
    done = run_tests(promtool, tmp_path, case.alert, fires, silent)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_holds_before_it_fires(case: AlertCase, promtool: Any, tmp_path: Path) -> None:
    """No alert but lost data fires on the first sample."""
    rule = next(r for r in ALERTS.rules if isinstance(r, Alert) and r.name == case.alert)
    if rule.hold == "0m":
        pytest.skip("fires at once on purpose")
    group = promtool_test(case.fires, case.alert, "15s", case.step, 0)
    assert run_tests(promtool, tmp_path, case.alert, group).returncode == 0


def test_few_requests_do_not_burn_a_budget(promtool: Any, tmp_path: Path) -> None:
    name = "kvbraid_coordinator_time_to_first_token_seconds"
    series = {
        f'{name}_bucket{{le="5.0"}}': "0x260",
        f"{name}_count": "0x200 0+1x60",
        'kvbraid_coordinator_requests_total{api="http",outcome="stop"}': "0x245 0+1x15",
    }
    group = promtool_test(series, "KVBraidTtftBudgetFast", "62m", "15s", 0)
    assert run_tests(promtool, tmp_path, "KVBraidTtftBudgetFast", group).returncode == 0


def test_releases_in_two_namespaces_have_budgets_of_their_own(
    promtool: Any, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.alert == "KVBraidTtftBudgetFast")
    # Alone `sick` is over the limit; with ten times its traffic from `well` the mean is not.
    series = {
        name.replace("{", '{namespace="sick",'): values for name, values in case.fires.items()
    }
    for name, values in case.silent.items():
        well = name.replace("{", '{namespace="well",')
        per_step, num_steps = values.removeprefix("0+").split("x")
        series[well] = f"0+{float(per_step) * 100:g}x{num_steps}"
    group = promtool_test(series, case.alert, case.at, case.step, 1)
    done = run_tests(promtool, tmp_path, case.alert, group)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_a_woken_person_reads(promtool: Any, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.alert == "KVBraidRankMissing")
    group = promtool_test(case.fires, case.alert, case.at, case.step, 1) | {
        "alert_rule_test": [
            {
                "eval_time": case.at,
                "alertname": case.alert,
                "exp_alerts": [
                    {
                        "exp_labels": {
                            "severity": "page", "rank": "3", "job": "kvbraid", "instance": "d",
                        },
                        "exp_annotations": {
                            "summary": "Rank 3 of d does not answer.",
                            "runbook_url": "https://github.com/kvbraid/kvbraid/blob/main/docs/"
                            "runbook.md#kvbraidrankmissing",
                        },
                    }
                ],
            }
        ]
    }  # fmt: skip
    done = run_tests(promtool, tmp_path, case.alert, group)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("end_s", "said"), [(86400, "expires in 23h 40m 0s"), (600, "has expired")]
)
def test_the_alert_says_how_long_a_certificate_lasts(
    end_s: int, said: str, promtool: Any, tmp_path: Path
) -> None:
    alert = "KVBraidCertificateAlmostExpired"
    (name,) = next(case for case in CASES if case.alert == alert).fires
    group = promtool_test({name: f"{end_s}x100"}, alert, "20m", "15s", 1) | {
        "alert_rule_test": [
            {
                "eval_time": "20m",
                "alertname": alert,
                "exp_alerts": [
                    {
                        "exp_labels": {
                            "severity": "page", "setting": "tls_certificate", "job": "kvbraid",
                            "instance": "d",
                        },
                        "exp_annotations": {
                            "summary": f"What tls_certificate of d names {said}.",
                            "runbook_url": f"{DEFAULT_RUNBOOK_URL}#{alert.lower()}",
                        },
                    }
                ],
            }
        ]
    }  # fmt: skip
    done = run_tests(promtool, tmp_path, alert, group)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_harness_notices_an_alert_that_does_not_fire(promtool: Any, tmp_path: Path) -> None:
    case = CASES[0]
    group = promtool_test(case.silent, case.alert, case.at, case.step, 1)
    assert run_tests(promtool, tmp_path, case.alert, group).returncode != 0


def test_dashboard_queries_parse(promtool: Any, tmp_path: Path) -> None:
    """promtool checks expressions as rules only."""
    queries = [
        query.expr for page in DASHBOARDS for panel in page.panels for query in panel.queries
    ]
    rules = [
        {"record": f"query:{i}", "expr": expr.replace("$__rate_interval", "1m")}
        for i, expr in enumerate(queries)
    ]
    path = tmp_path / "queries.yaml"
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    done = promtool("check", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(queries)} rules found" in done.stdout


def test_a_chosen_threshold_and_selector_keep_the_rules_valid(
    promtool: Any, tmp_path: Path
) -> None:
    text = RECORDING.to_yaml().replace("@TTFT_SECONDS@", "10").replace(
        "@SELECTOR@", 'namespace=\\"prod\\"'
    )  # fmt: skip
    path = tmp_path / "recording.yaml"
    path.write_text(with_defaults(text))
    assert promtool("check", "rules", str(path)).returncode == 0
    assert 'le=~\\"10([.]0)?\\",namespace=\\"prod\\"' in text
