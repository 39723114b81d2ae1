"""Grace, probes, ports, scaling targets and monitors follow from the code and fit each other."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import kvbraid.rpc.server
from kvbraid.settings import ServerSettings
from kvbraid.telemetry.metrics import CoordinatorMetrics, DraftServiceMetrics, WorkerMetrics
from tests.deploy.charts import (
    CHART,
    DRAFTING,
    EXAMPLES,
    Manifest,
    Values,
    by_kind,
    example,
    pod_templates,
    render,
    the,
    yaml,
)
from tests.deploy.processes import container_of, settings_seen_by

WORKERS = ("prefill", "decode", "draft")
SCALED: Values = {
    "prefill": {"autoscaling": {}},
    "decode": {"autoscaling": {"reserved_pages": 100}},
    "draft": {"autoscaling": {}} | DRAFTING["draft"],
}


def exported_metrics() -> set[str]:
    """Names, as Prometheus stores them, of what coordinators and workers export."""
    registries = [
        CoordinatorMetrics().registry,
        WorkerMetrics("prefill").registry,
        DraftServiceMetrics().registry,
    ]
    names = set()
    for family in (family for registry in registries for family in registry.collect()):
        names.add(family.name + ("_total" if family.type == "counter" else ""))
    return names


def stop_seconds() -> float:
    """How long the code may take after the drain: calls unwind, then the engine, then its ranks."""
    source = Path(kvbraid.rpc.server.__file__).parents[1]
    found = [kvbraid.rpc.server._UNWIND_S]
    for file, name in (
        ("worker/leader.py", "_ENGINE_STOP_GRACE_S"),
        ("worker/worker_process.py", "_RANK_STOP_GRACE_S"),
    ):
        (value,) = re.findall(rf"^{name} = ([\d.]+)$", (source / file).read_text(), re.MULTILINE)
        found.append(float(value))
    return sum(found)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_grace_covers_endpoints_drain_and_stop(path: Path, tmp_path: Path) -> None:
    manifests = render(path)
    for role in ("coordinator", "prefill", "decode"):
        config = settings_seen_by(manifests, role, tmp_path)
        for name, template in pod_templates(manifests):
            if f"-{role}" not in name:
                continue
            sleep = template["spec"]["containers"][0].get("lifecycle", {}).get("preStop", {})
            needed = sleep.get("sleep", {}).get("seconds", 0) + config.server.drain_seconds
            grace = template["spec"]["terminationGracePeriodSeconds"]
            assert math.ceil(needed + stop_seconds()) < grace <= needed + stop_seconds() + 10, name


def test_the_default_drain_is_the_services_own() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert values["settings"]["drain_seconds"] == ServerSettings().drain_seconds


def test_probes_ask_for_the_role_on_its_port() -> None:
    manifests = render(example("laptop-cpu"), values=DRAFTING)
    for role in ("coordinator", *WORKERS):
        container = container_of(manifests, role)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert container["readinessProbe"]["grpc"] == {"port": ports["grpc"], "service": role}


def test_a_coordinator_without_workers_is_alive() -> None:
    """gRPC health says NOT_SERVING then, which would restart it for ever."""
    container = container_of(render(example("laptop-cpu")), "coordinator")
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/v1/models", "port": "http"}


def test_hosts_of_a_group_differ_in_what_only_rank_0_has() -> None:
    (group,) = by_kind(render(example("dcp16-two-nodes")), "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    leader, other = template["leaderTemplate"], template["workerTemplate"]
    assert template["size"] == 2
    assert leader["metadata"]["labels"].pop("kvbraid/rank-zero") == "true"
    assert leader["metadata"] == other["metadata"]
    first, second = (t["spec"]["containers"][0] for t in (leader, other))
    assert first["command"] == second["command"]
    assert [port["name"] for port in first["ports"]] == ["grpc", "metrics"]
    assert [port["name"] for port in second["ports"]] == ["grpc"]
    assert second["readinessProbe"]["tcpSocket"] == {"port": "grpc"}
    assert "livenessProbe" not in second


def test_the_pods_service_finds_rank_0_only() -> None:
    manifests = render(example("dcp16-two-nodes"))
    service = the(manifests, "Service", "decode-pods")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    found = [
        name
        for name, template in pod_templates(manifests)
        if service["selector"].items() <= template["metadata"]["labels"].items()
    ]
    assert found == ["LeaderWorkerSet kv-kvbraid-decode leaderTemplate"]


def test_no_service_has_the_name_of_a_group() -> None:
    """The LeaderWorkerSet controller makes a Service of that name itself."""
    manifests = render(example("dcp16-two-nodes"))
    names = {m["metadata"]["name"] for m in by_kind(manifests, "Service")}
    assert not names & {m["metadata"]["name"] for m in by_kind(manifests, "LeaderWorkerSet")}


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_every_metric_that_scales_is_exported(kind: str) -> None:
    values = copy.deepcopy(SCALED)
    for role in WORKERS:
        values[role]["autoscaling"]["kind"] = kind
    manifests = render(example("laptop-cpu"), values=values)
    used = set(re.findall(r"kvbraid_\w+", json.dumps(scaling_metrics(manifests))))
    assert len(used) == len(WORKERS)
    assert used <= exported_metrics()
    assert not re.search(r"\bcpu\b", json.dumps(scaling_metrics(manifests)))


def scaling_metrics(manifests: list[Manifest]) -> list[Any]:
    return [m["spec"]["metrics"] for m in by_kind(manifests, "HorizontalPodAutoscaler")] + [
        m["spec"]["triggers"] for m in by_kind(manifests, "ScaledObject")
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_scaled_roles_leave_their_replicas_to_the_scaler(path: Path) -> None:
    manifests = render(path)
    scalers = by_kind(manifests, "HorizontalPodAutoscaler") + by_kind(manifests, "ScaledObject")
    targets = {
        (target["apiVersion"], target["kind"], target["name"])
        for target in (scaler["spec"]["scaleTargetRef"] for scaler in scalers)
    }
    for manifest in manifests:
        key = (manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"])
        if manifest["kind"] in ("Deployment", "LeaderWorkerSet"):
            assert ("replicas" in manifest["spec"]) is (key not in targets), key
            targets.discard(key)
    assert targets == set()


def test_disruption_budgets_let_nodes_be_emptied() -> None:
    for path in EXAMPLES:
        for budget in by_kind(render(path), "PodDisruptionBudget"):
            assert budget["spec"]["maxUnavailable"] >= 1


def test_the_monitor_finds_every_role_once() -> None:
    manifests = render(example("dcp16-two-nodes"))
    (monitor,) = by_kind(manifests, "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    services = [
        s for s in by_kind(manifests, "Service") if wanted <= s["metadata"]["labels"].items()
    ]
    roles = [s["metadata"]["labels"]["app.kubernetes.io/component"] for s in services]
    assert sorted(roles) == ["coordinator", "decode", "prefill"]
    for service in services:
        assert "metrics" in [port["name"] for port in service["spec"]["ports"]]


def test_rules_and_dashboards_are_those_of_the_files() -> None:
    values = {"monitoring": {"slo": {"ttft_seconds": 2.5, "ttft_objective": 0.95}}}
    manifests = render(example("dcp16-two-nodes"), values=values)
    rules = by_kind(manifests, "PrometheusRule")
    assert len(rules) == len(list((CHART / "files/alerts").glob("*.yaml")))
    text = json.dumps(rules)
    assert not re.search(r"@\w+@", text)
    assert 'namespace=\\"serving\\"' in text
    assert "2.5([.]0)?" in text
    assert "(1 - 0.95)" in text
    for path in (CHART / "files/dashboards").glob("*.json"):
        config_map = the(manifests, "ConfigMap", f"dashboard-{path.stem}")
        assert json.loads(config_map["data"][path.name]) == json.loads(path.read_text())


def test_default_thresholds_are_those_of_the_rules() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    slos = json.loads((CHART / "files/alerts/slo.json").read_text(encoding="utf-8"))
    assert values["monitoring"]["slo"] == {key: slo["default"] for key, slo in slos.items()}


def test_rules_are_plain_names_of_kubernetes() -> None:
    for path in EXAMPLES:
        for manifest in render(path):
            name = manifest["metadata"]["name"]
            assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name), name
            assert len(name) <= 63
