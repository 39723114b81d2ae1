"""Rendered manifests are what the API servers and operators take."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.charts import (
    CHART,
    KUBE_VERSION,
    Manifest,
    all_renders,
    by_kind,
    example,
    pod_templates,
    render,
    run_helm,
    yaml,
)

kubernetes_validate = pytest.importorskip("kubernetes_validate")
jsonschema = pytest.importorskip("jsonschema")
prometheus_operator = pytest.importorskip("cloudcoil.models.prometheus_operator.v1")
keda = pytest.importorskip("cloudcoil.models.keda.v1alpha1")
cert_manager = pytest.importorskip("cloudcoil.models.cert_manager.v1")

VERSIONS = ("1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
LEADER_WORKER_SET = json.loads(
    (Path(__file__).parent / "schemas/leaderworkerset.schema.json").read_text(encoding="utf-8")
)
OPERATOR_KINDS = {
    "ServiceMonitor": prometheus_operator.ServiceMonitor,
    "PrometheusRule": prometheus_operator.PrometheusRule,
    "ScaledObject": keda.ScaledObject,
    "Certificate": cert_manager.Certificate,
}

# It reads 4 MB of JSON for each manifest otherwise.
_cached_contents = functools.lru_cache(maxsize=16)(kubernetes_validate.utils.schema_contents)


@pytest.fixture(autouse=True)
def _schemas_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", _cached_contents)


def built_in(manifests: list[Manifest]) -> list[Manifest]:
    """Manifests of Kubernetes itself, and a PodTemplate for every pod of a LeaderWorkerSet."""
    others = {"LeaderWorkerSet", *OPERATOR_KINDS}
    found = [manifest for manifest in manifests if manifest["kind"] not in others]
    for group in by_kind(manifests, "LeaderWorkerSet"):
        for name, template in pod_templates([group]):
            metadata = {"name": name.replace(" ", "-").lower()}
            kind = {"apiVersion": "v1", "kind": "PodTemplate"}
            found.append({**kind, "metadata": metadata, "template": template})
    return found


def check_operator_kind(manifest: Manifest) -> None:
    """The typed model takes it and keeps every field of it."""
    model = OPERATOR_KINDS[manifest["kind"]].model_validate(manifest)
    kept = json.loads(model.model_dump_json(by_alias=True, exclude_none=True, exclude_unset=True))
    assert without_nulls(kept) == without_nulls(manifest)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_them(version: str) -> None:
    for manifests in all_renders().values():
        for manifest in built_in(manifests):
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("file", ["laptop-cpu", "dcp16-two-nodes"])
def test_names_that_look_like_numbers_stay_names(file: str) -> None:
    """Helm and Kubernetes allow them; the API server takes no number where text belongs."""
    classes = {"priority_class_name": "1000", "runtime_class_name": "7"}
    values = {
        "decode": {**classes, "exclusive_topology_key": "12"},
        "model_volume": {"kind": "pvc", "storage_class": "8", "claim_name": ""},
    }
    path, names = str(example(file)), ("123", "--namespace", "2024")
    versions = ("--kube-version", KUBE_VERSION)
    arguments = ("template", *names, str(CHART), *versions, "--values", path)
    code, out, err = run_helm("helm4", *arguments, values=values)
    assert code == 0, err
    manifests = [manifest for manifest in yaml.safe_load_all(out) if manifest]
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"2024"}
    for manifest in built_in(manifests):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    for group in by_kind(manifests, "LeaderWorkerSet"):
        jsonschema.validate(group, LEADER_WORKER_SET)
        assert set(map(type, group["metadata"]["annotations"].values())) == {str}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_are_strict(version: str) -> None:
    """Or the test above could not fail."""
    manifest = copy.deepcopy(by_kind(render(example("laptop-cpu")), "Deployment")[0])
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    container["readinessProbe"]["failureTreshold"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_operators_take_their_kinds() -> None:
    found = set()
    for manifests in all_renders().values():
        for kind in OPERATOR_KINDS:
            for manifest in by_kind(manifests, kind):
                check_operator_kind(manifest)
                found.add(kind)
    assert found == set(OPERATOR_KINDS)


def test_a_misspelt_field_of_an_operator_kind_is_found() -> None:
    (monitor,) = by_kind(render(example("dcp16-two-nodes")), "ServiceMonitor")
    broken = copy.deepcopy(monitor)
    broken["spec"]["endpoints"][0]["intervall"] = "5s"
    with pytest.raises((ValueError, AssertionError)):
        check_operator_kind(broken)


def test_leader_worker_sets_fit_their_published_api() -> None:
    (group,) = by_kind(render(example("dcp16-two-nodes")), "LeaderWorkerSet")
    jsonschema.validate(group, LEADER_WORKER_SET)
    group = copy.deepcopy(group)
    group["spec"]["leaderWorkerTemplate"]["sizes"] = 2
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(group, LEADER_WORKER_SET)
