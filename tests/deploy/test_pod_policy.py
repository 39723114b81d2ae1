"""Every pod of every render keeps the rules of a restricted namespace, and ours on top."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.charts import Manifest, all_renders, example, pod_templates, render

ALLOWED_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "image", "secret"}


def pods() -> list[tuple[str, Manifest]]:
    return [
        (f"{render_name}: {pod_name}", template)
        for render_name, manifests in all_renders().items()
        for pod_name, template in pod_templates(manifests)
    ]


def containers(template: Manifest) -> list[dict[str, Any]]:
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def test_there_are_pods_of_every_role_and_a_job() -> None:
    names = " ".join(name for name, _ in pods())
    for role in ("coordinator", "prefill", "decode", "draft", "pull", "workerTemplate"):
        assert role in names


def test_pods_are_restricted() -> None:
    for name, template in pods():
        spec = template["spec"]
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["runAsUser"] >= 1, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")), name


def test_pods_have_no_token_and_no_service_links() -> None:
    for name, template in pods():
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False, name
        # A Service kvbraid-decode would become KVBRAID_DECODE_PORT=tcp://..., which is a setting.
        assert spec["enableServiceLinks"] is False, name


def test_containers_can_do_nothing_special() -> None:
    for name, template in pods():
        for container in containers(template):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name


def test_containers_say_what_they_need() -> None:
    for name, template in pods():
        for container in containers(template):
            resources = container["resources"]
            for kind in ("requests", "limits"):
                assert {"cpu", "memory"} <= resources[kind].keys(), f"{name} {kind}"
            extended = {key for key in resources["limits"] if "/" in key}
            for key in extended:
                assert resources["requests"][key] == resources["limits"][key], f"{name} {key}"


def test_images_are_named_exactly() -> None:
    for name, template in pods():
        for container in containers(template):
            image = container["image"]
            tag = image.rpartition("/")[2].partition(":")[2]
            assert "@sha256:" in image or (tag and "latest" not in tag), f"{name}: {image}"


def test_volumes_are_of_allowed_kinds() -> None:
    for name, template in pods():
        for volume in template["spec"]["volumes"]:
            (kind,) = volume.keys() - {"name"}
            if kind == "hostPath":
                assert name.startswith("one-8-gpu-node"), f"{name}: a folder of the node"
                continue
            assert kind in ALLOWED_VOLUMES, f"{name}: {kind}"


def test_models_are_read_only_for_all_but_the_job() -> None:
    for name, template in pods():
        for container in containers(template):
            for mount in container["volumeMounts"]:
                if mount["name"] == "models":
                    assert mount.get("readOnly", False) is (container["name"] != "pull"), name


def test_digests_outweigh_tags() -> None:
    digest = "sha256:" + "0" * 64
    values = {"image": {"digests": {"cpu": digest}}}
    for _, template in pod_templates(render(example("laptop-cpu"), values=values)):
        for container in containers(template):
            assert container["image"] == f"kvbraid@{digest}"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_gpu_for_each_rank(role: str) -> None:
    manifests = render(example("one-8-gpu-node"))
    (template,) = (t for name, t in pod_templates(manifests) if name.endswith(f"-{role}"))
    assert template["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4
