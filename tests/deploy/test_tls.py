"""Certificates out of Secrets: who mounts which, what follows for settings, probes and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.deploy.charts import (
    DRAFTING,
    Manifest,
    Values,
    by_kind,
    example,
    pod_templates,
    render,
    the,
)
from tests.deploy.processes import container_of, settings_seen_by

ROLES = ("coordinator", "prefill", "decode", "draft")
SECRET: Values = {"tls": {"secret_name": "inner"}}
FRONT: Values = {"tls": {"secret_name": "inner", "front_secret_name": "public"}}
DOOR_ONLY: Values = {"tls": {"front_secret_name": "public", "client_certificates": False}}
HEALTH_PORT = 8081
INNER, OUTER = "/etc/kvbraid-tls", "/etc/kvbraid-front-tls"


def rendered(values: Values) -> list[Manifest]:
    return render(example("laptop-cpu"), values=DRAFTING | values)


def tls_of(manifests: list[Manifest], role: str, folder: Path) -> Any:
    return settings_seen_by(manifests, role, folder).server.tls


def secrets_of(manifests: list[Manifest], role: str) -> dict[str, tuple[str, list[str]]]:
    """Secret name -> (where it is mounted, its files) in the role's pods."""
    (spec,) = (t["spec"] for name, t in pod_templates(manifests) if name.endswith(f"-{role}"))
    mounts = {m["name"]: m for m in spec["containers"][0]["volumeMounts"]}
    found = {}
    for volume in spec["volumes"]:
        if "secret" in volume:
            mount, secret = mounts[volume["name"]], volume["secret"]
            assert mount["readOnly"] is True
            # No subPath, or a renewal would not arrive. The pod's group may read, others may not.
            assert "subPath" not in mount
            assert secret["defaultMode"] == 0o440
            files = [item["path"] for item in secret["items"]]
            found[secret["secretName"]] = (mount["mountPath"], files)
    return found


@pytest.mark.parametrize("role", ROLES)
def test_one_secret_makes_everything_mutual(role: str, tmp_path: Path) -> None:
    manifests = rendered(SECRET)
    assert secrets_of(manifests, role) == {"inner": (INNER, ["tls.crt", "tls.key", "ca.crt"])}
    tls = tls_of(manifests, role, tmp_path)
    assert (tls.tls_certificate, tls.tls_private_key) == (f"{INNER}/tls.crt", f"{INNER}/tls.key")
    assert tls.tls_client_ca == tls.tls_server_ca == f"{INNER}/ca.crt"
    assert tls.tls_server_name == "kv-kvbraid.serving.svc"
    assert tls.shown_pair == (tls.tls_certificate, tls.tls_private_key)


def test_coordinators_may_have_a_certificate_of_their_own(tmp_path: Path) -> None:
    manifests = rendered(FRONT)
    assert secrets_of(manifests, "coordinator").keys() == {"inner", "public"}
    assert secrets_of(manifests, "decode").keys() == {"inner"}
    front = tls_of(manifests, "coordinator", tmp_path)
    assert (front.tls_certificate, front.tls_client_ca) == (f"{OUTER}/tls.crt", f"{OUTER}/ca.crt")
    assert front.shown_pair == (f"{INNER}/tls.crt", f"{INNER}/tls.key")
    assert front.tls_server_ca == f"{INNER}/ca.crt"


def test_clients_need_no_certificate_where_they_are_not_asked(tmp_path: Path) -> None:
    values = {"tls": FRONT["tls"] | {"client_certificates": False}}
    manifests = rendered(values)
    assert secrets_of(manifests, "coordinator")["public"] == (OUTER, ["tls.crt", "tls.key"])
    assert tls_of(manifests, "coordinator", tmp_path).tls_client_ca == ""
    # Between roles it stays mutual.
    assert tls_of(manifests, "decode", tmp_path).tls_client_ca == f"{INNER}/ca.crt"


def test_the_door_alone_may_be_encrypted(tmp_path: Path) -> None:
    manifests = rendered(DOOR_ONLY)
    front, decode = (tls_of(manifests, role, tmp_path) for role in ("coordinator", "decode"))
    assert (front.serves, front.calls) == (True, False)
    assert (decode.serves, decode.calls) == (False, False)
    assert secrets_of(manifests, "decode") == {}


@pytest.mark.parametrize("role", ROLES)
def test_probes_ask_the_health_port(role: str, tmp_path: Path) -> None:
    manifests = rendered(SECRET)
    container = container_of(manifests, role)
    assert {"name": "health", "containerPort": HEALTH_PORT} in container["ports"]
    assert settings_seen_by(manifests, role, tmp_path).server.health_port == HEALTH_PORT
    started = "live" if role == "coordinator" else role
    asked = {kind: container[f"{kind}Probe"]["grpc"] for kind in ("startup", "readiness")}
    assert asked == {
        "startup": {"port": HEALTH_PORT, "service": started},
        "readiness": {"port": HEALTH_PORT, "service": role},
    }
    assert container["livenessProbe"]["grpc"] == {"port": HEALTH_PORT, "service": "live"}


def test_a_health_port_may_be_chosen_without_tls(tmp_path: Path) -> None:
    manifests = rendered({"settings": {"health_port": 7000}})
    for role in ROLES:
        probes = container_of(manifests, role)
        assert probes["livenessProbe"]["grpc"]["port"] == 7000
        assert settings_seen_by(manifests, role, tmp_path).server.health_port == 7000


def test_without_tls_nothing_is_mounted_and_there_is_no_health_port(tmp_path: Path) -> None:
    manifests = rendered({})
    for role in ROLES:
        assert secrets_of(manifests, role) == {}
        server = settings_seen_by(manifests, role, tmp_path).server
        assert (server.health_port, server.tls.serves, server.tls.calls) == (None, False, False)
        assert "health" not in {port["name"] for port in container_of(manifests, role)["ports"]}


def test_no_policy_opens_the_health_port() -> None:
    """A node may always call its own pods, and nobody else needs it."""
    opened = {
        port["port"]
        for policy in by_kind(rendered(SECRET), "NetworkPolicy")
        for rule in policy["spec"].get("ingress", [])
        for port in rule.get("ports", [])
    }
    assert opened & {"health", HEALTH_PORT} == set()
    assert {"grpc", "http", "metrics"} <= opened


def test_services_say_what_is_spoken() -> None:
    def protocols(values: Values, name: str) -> dict[str, str]:
        service = the(rendered(values), "Service", name)
        return {port["name"]: port["appProtocol"] for port in service["spec"]["ports"]}

    assert protocols(SECRET, "coordinator") == {"grpc": "https", "http": "https"}
    assert protocols(SECRET, "decode-pods") == {"grpc": "https", "metrics": "http"}
    assert protocols(DOOR_ONLY, "coordinator") == {"grpc": "https", "http": "https"}
    assert protocols(DOOR_ONLY, "decode-pods")["grpc"] == "kubernetes.io/h2c"


def test_cert_manager_writes_the_secret_with_the_name_that_roles_expect(tmp_path: Path) -> None:
    manifests = render(example("mutual-tls"))
    (certificate,) = by_kind(manifests, "Certificate")
    spec = certificate["spec"]
    assert secrets_of(manifests, "decode").keys() == {spec["secretName"]}
    assert tls_of(manifests, "decode", tmp_path).tls_server_name in spec["dnsNames"]
    assert {"server auth", "client auth"} <= set(spec["usages"])
    service = the(manifests, "Service", "coordinator")["metadata"]
    assert f"{service['name']}.{service['namespace']}.svc" in spec["dnsNames"]


def test_settings_of_a_role_outweigh_the_secret(tmp_path: Path) -> None:
    values = SECRET | {"coordinator": {"settings": {"tls_client_ca": ""}}}
    assert tls_of(rendered(values), "coordinator", tmp_path).tls_client_ca == ""
