"""What a rendered pod starts: command, environment and settings, as the process will see them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from kvbraid.settings import load_settings
from tests.deploy.charts import Manifest, pod_templates, the

POD_IP = "10.1.2.3"


def container_of(manifests: list[Manifest], role: str) -> dict[str, Any]:
    """The role's own container; that of the first pod of a group."""
    for name, template in pod_templates(manifests):
        if name.removesuffix(" leaderTemplate").endswith(f"-{role}"):
            container: dict[str, Any] = template["spec"]["containers"][0]
            return container
    raise LookupError(role)


def environment_of(manifests: list[Manifest], role: str, folder: Path) -> dict[str, str]:
    """Its variables, with the mounted file lying in `folder` instead of /etc/kvbraid."""
    file = folder / f"{role}.toml"
    text = the(manifests, "ConfigMap", role)["data"]["kvbraid.toml"]
    file.write_text(text, encoding="utf-8")
    found = {}
    for variable in container_of(manifests, role)["env"]:
        source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        found[variable["name"]] = POD_IP if source == "status.podIP" else variable["value"]
    assert found["KVBRAID_CONFIG"] == "/etc/kvbraid/kvbraid.toml"
    return found | {"KVBRAID_CONFIG": str(file)}


def config_class(role: str) -> type:
    """The dataclass that a service of that role loads."""
    package = role if role == "coordinator" else f"{role}_service"
    config: type = getattr(
        importlib.import_module(f"{package}.config"), f"{role.capitalize()}Config"
    )
    return config


def settings_seen_by(manifests: list[Manifest], role: str, folder: Path) -> Any:
    """The config that the role's process loads."""
    return load_settings(config_class(role), [], environment_of(manifests, role, folder), role=role)
