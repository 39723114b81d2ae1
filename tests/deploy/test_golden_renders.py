"""What the examples render is in the tree, so that a review sees what a change does to them.

`python -m tests.deploy.test_golden_renders` writes the files anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.charts import EXAMPLES, Manifest, render, yaml

GOLDEN = Path(__file__).parent / "golden"
# Labels that every object has; one test looks at them, here they would be half of the text.
_SAME_EVERYWHERE = re.compile(
    r"app\.kubernetes\.io/(name|instance|version|managed-by)|helm\.sh/chart"
)


def compact(manifests: list[Manifest]) -> str:
    """One object a document, leaves on one line; generated files and checksums left out."""
    texts = [
        yaml.safe_dump(
            _without_noise(manifest), default_flow_style=None, width=110, sort_keys=False
        )
        for manifest in sorted(manifests, key=lambda m: (m["kind"], m["metadata"]["name"]))
    ]
    return "---\n".join(texts)


def _without_noise(manifest: Manifest) -> Manifest:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    kept: Manifest = _pruned(manifest)
    if kind == "PrometheusRule" or "-dashboard-" in name:
        return {key: kept[key] for key in ("apiVersion", "kind", "metadata")}
    if kind == "ConfigMap":
        kept["data"] = {
            key: [line for line in text.splitlines() if line] for key, text in kept["data"].items()
        }
    return kept


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: "(checksum)" if key.startswith("checksum/") else _pruned(item)
            for key, item in value.items()
            if not _SAME_EVERYWHERE.fullmatch(key)
        }
    return [_pruned(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_render_what_is_in_the_tree(example: Path) -> None:
    golden = (GOLDEN / f"{example.stem}.yaml").read_text(encoding="utf-8")
    assert compact(render(example)) == golden, (
        "run `python -m tests.deploy.test_golden_renders` and look at the difference"
    )


def test_labels_left_out_of_the_files_are_on_every_object() -> None:
    for example in EXAMPLES:
        for manifest in render(example):
            labels = [key for key in manifest["metadata"]["labels"] if _SAME_EVERYWHERE.match(key)]
            assert len(labels) == 5, manifest["metadata"]["name"]


if __name__ == "__main__":
    for path in EXAMPLES:
        (GOLDEN / f"{path.stem}.yaml").write_text(compact(render(path)), encoding="utf-8")
