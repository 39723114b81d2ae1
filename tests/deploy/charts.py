"""Renders of the chart, as the tests look at them."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="pip install -e '.[deploy]' brings what these tests need")

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/kvbraid"
EXAMPLES = sorted((ROOT / "deploy/helm/examples").glob("*.yaml"))
HELMS = {"helm3": "v3.17", "helm4": "v4.3"}
RELEASE, NAMESPACE = "kv", "serving"
# What `helm template` assumes of the cluster, whatever helm's own version thinks is current.
KUBE_VERSION = "1.35.0"

# Rendered beside the examples: what no example turns on.
DRAFTING = {"draft": {"replicas": 2, "settings": {"drafter": "/models/drafter"}}}

Manifest = dict[str, Any]
Values = dict[str, Any]


def helm(name: str) -> str:
    """Path of the binary; skips the test loudly where it is not installed."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not there; get it with: {sys.executable} -m tools.fetch_helm")
    return found


def run_helm(name: str, *arguments: str, values: Values | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr. values: given as one more values file, on stdin."""
    extra = ["--values", "-"] if values is not None else []
    done = subprocess.run(
        [helm(name), *arguments, *extra],
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


@functools.cache
def _rendered_text(name: str, files: tuple[Path, ...], values_text: str) -> str:
    code, out, err = run_helm(
        name,
        *("template", RELEASE, str(CHART), "--namespace", NAMESPACE),
        *("--kube-version", KUBE_VERSION),
        *(part for file in files for part in ("--values", str(file))),
        values=json.loads(values_text),
    )
    assert code == 0, err
    return out


def render(*files: Path, values: Values | None = None, name: str = "helm4") -> list[Manifest]:
    """The manifests of the chart with these values files, `values` outweighing them."""
    text = _rendered_text(name, files, json.dumps(values or {}))
    return [document for document in yaml.safe_load_all(text) if document]


def refusal(*files: Path, values: Values, name: str = "helm4") -> str:
    """What helm says about values that it must refuse."""
    code, out, err = run_helm(
        name,
        *("template", RELEASE, str(CHART), "--kube-version", KUBE_VERSION),
        *(part for file in files for part in ("--values", str(file))),
        values=values,
    )
    assert code != 0, f"not refused: {values}\n{out[:300]}"
    return err


def example(name: str) -> Path:
    """Values file of an example."""
    return ROOT / f"deploy/helm/examples/{name}.yaml"


def by_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """The manifests of a kind."""
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def the(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The one manifest of that kind and name, without the release's prefix."""
    full = f"{RELEASE}-kvbraid{name and '-'}{name}"
    (found,) = (m for m in by_kind(manifests, kind) if m["metadata"]["name"] == full)
    return found


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """(a name for messages, template) of every pod that the manifests make."""
    for manifest in manifests:
        name = f"{manifest['kind']} {manifest['metadata']['name']}"
        spec = manifest.get("spec", {})
        if "leaderWorkerTemplate" in spec:
            for place in ("leaderTemplate", "workerTemplate"):
                yield f"{name} {place}", spec["leaderWorkerTemplate"][place]
        elif "template" in spec:
            yield name, spec["template"]


def all_renders() -> dict[str, list[Manifest]]:
    """Every example, and the laptop with draft workers, by name."""
    renders = {path.stem: render(path) for path in EXAMPLES}
    return renders | {"drafting": render(example("laptop-cpu"), values=DRAFTING)}
