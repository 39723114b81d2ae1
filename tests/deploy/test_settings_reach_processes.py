"""Values below `settings` arrive in the processes, every one of them."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest

from kvbraid.settings import ROLES, ByteSize
from kvbraid.settings.fields import Setting, strip_optional
from tests.deploy.charts import DRAFTING, EXAMPLES, Values, example, render
from tests.deploy.processes import POD_IP, settings_seen_by
from tools.chart_settings import SCHEMA, refreshed, role_settings, shared_settings

# A setting that needs another one beside it.
COMPANIONS: dict[str, dict[str, Any]] = {
    "dcp_size": {"tp_size": 4},
    "interleave": {"page_size": 32},
    "draft_worker": {"tap_fusion": "/models/drafter"},
    "tap_fusion": {"draft_worker": "drafts:1"},
    "max_model_len": {"kv_cache_tokens": 65536},
}
# Values that are legal where the rule of `another` would give one that is not.
CHOSEN: dict[str, Any] = {
    "port": 6000,
    "metrics_port": 7000,
    "http_port": 8000,
    "health_port": 8100,
    "tp_size": 4,
    "dcp_size": 2,
    "model": "/models/another",
    "device": "cpu:0",
    "kv_mover": "grpc_push",
    "draft_wire": "grpc",
    "communicator": "gloo",
    "draft_worker": "drafts:1",
    "max_model_len": 1234,
    "interleave": 2,
    "kv_cache_tokens": 65536,
    "max_connection_age_grace_seconds": 5000.0,
}


def another(item: Setting) -> Any:
    """A legal value that is not the default."""
    if item.name in CHOSEN:
        return CHOSEN[item.name]
    annotation, _ = strip_optional(item.type)
    if item.is_list:
        return ["one:1", "dns:two:2"]
    if typing.get_origin(annotation) is typing.Literal:
        return next(choice for choice in typing.get_args(annotation) if choice != item.default)
    if annotation is bool:
        return not item.default
    if annotation is str:
        return f'a "quoted" <{item.name}>'
    high = item.description.maximum
    larger = item.default * 2 + 1
    if annotation is float:
        larger += 0.25
    return larger if high is None or larger <= high else (item.default + high) / 2


def leaf(config: Any, name: str) -> Any:
    """The setting of that flat name."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found = leaf(value, name)
            if found is not None:
                return found
        elif field.name == name:
            return value
    return None


def values_with(role: str, settings: dict[str, Any]) -> Values:
    """Settings of TLS are given to all roles: one that serves over it must be called over it."""
    shared = {name: value for name, value in settings.items() if name.startswith("tls_")}
    own = {name: value for name, value in settings.items() if name not in shared}
    if shared:
        shared["health_port"] = own.get("health_port", 8100)
    return {"settings": shared} | values_of_role(role, own)


def values_of_role(role: str, settings: dict[str, Any]) -> Values:
    base = {"coordinator": {"replicas": 1}} if role == "coordinator" else {}
    if role == "draft":
        return {"draft": {"replicas": 1, "settings": {"drafter": "/models/d"} | settings}}
    return base | {role: base.get(role, {}) | {"settings": settings}}


def check_reachable(role: str, names: list[str], folder: Path) -> None:
    known = role_settings(role)
    given = {name: another(known[name]) for name in names}
    companions = {k: v for name in names for k, v in COMPANIONS.get(name, {}).items() if k in known}
    values = values_with(role, given | companions)
    config = settings_seen_by(render(example("laptop-cpu"), values=values), role, folder)
    for name, value in given.items():
        assert leaf(config, name) == value != known[name].default, name


@pytest.mark.parametrize("role", ROLES)
def test_every_setting_is_reachable(role: str, tmp_path: Path) -> None:
    """All in one render, but for those that need or exclude another."""
    check_reachable(role, [n for n in role_settings(role) if n not in COMPANIONS], tmp_path)


@pytest.mark.parametrize(
    ("role", "name"), [(r, n) for r in ROLES for n in role_settings(r) if n in COMPANIONS]
)
def test_every_setting_that_needs_another_is_reachable(
    role: str, name: str, tmp_path: Path
) -> None:
    check_reachable(role, [name], tmp_path)


def test_byte_sizes_are_numbers_or_text(tmp_path: Path) -> None:
    for given in (33554432, "32MiB"):
        values = {"settings": {"max_message_bytes": given}}
        config = settings_seen_by(render(example("laptop-cpu"), values=values), "decode", tmp_path)
        assert config.server.max_message_bytes == ByteSize(32 << 20)


def test_a_role_outweighs_what_is_shared(tmp_path: Path) -> None:
    values = {
        "settings": {"prefix_cache": True, "log_level": "debug", "reflection": True},
        "decode": {"settings": {"prefix_cache": False, "log_level": "error"}},
    }
    manifests = render(example("laptop-cpu"), values=values)
    decode = settings_seen_by(manifests, "decode", tmp_path)
    prefill = settings_seen_by(manifests, "prefill", tmp_path)
    assert (decode.kv.prefix_cache, decode.server.log_level) == (False, "error")
    assert (prefill.kv.prefix_cache, prefill.server.log_level) == (True, "debug")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_processes_take_the_settings_of_the_examples(path: Path, tmp_path: Path) -> None:
    manifests = render(path)
    for role in ("coordinator", "prefill", "decode"):
        config = settings_seen_by(manifests, role, tmp_path)
        assert config.server.host == "0.0.0.0"
        assert config.server.reachable_host == POD_IP
        assert min(config.server.port, config.server.metrics_port) > 0


def test_workers_of_the_release_find_each_other(tmp_path: Path) -> None:
    manifests = render(example("laptop-cpu"), values=DRAFTING)
    routing = settings_seen_by(manifests, "coordinator", tmp_path).routing
    assert routing.prefill_workers == ["dns:kv-kvbraid-prefill-pods.serving.svc:50052"]
    assert routing.decode_workers == ["dns:kv-kvbraid-decode-pods.serving.svc:50053"]
    for role in ("prefill", "decode"):
        speculative = settings_seen_by(manifests, role, tmp_path).speculative
        assert speculative.draft_worker == "kv-kvbraid-draft.serving.svc:50054"
        assert speculative.tap_fusion == "/models/drafter"


def test_workers_elsewhere_outweigh_those_of_the_release(tmp_path: Path) -> None:
    values = {"coordinator": {"settings": {"decode_workers": ["gpu7:1", "gpu8:1"]}}}
    manifests = render(example("laptop-cpu"), values=values)
    routing = settings_seen_by(manifests, "coordinator", tmp_path).routing
    assert routing.decode_workers == ["gpu7:1", "gpu8:1"]


@pytest.mark.parametrize(
    ("limit", "ranks", "threads"), [("4", 1, 4), (8, 2, 4), ("2500m", 1, 2), ("500m", 2, 1)]
)
def test_threads_follow_the_limit_and_not_the_node(
    limit: str | int, ranks: int, threads: int, tmp_path: Path
) -> None:
    resources = {"limits": {"cpu": limit}}
    values = {"decode": {"resources": resources, "settings": {"tp_size": ranks, "dcp_size": 1}}}
    config = settings_seen_by(render(example("laptop-cpu"), values=values), "decode", tmp_path)
    assert config.parallel.threads_per_rank == threads


def test_the_schema_is_as_new_as_the_settings() -> None:
    text = SCHEMA.read_text(encoding="utf-8")
    assert refreshed(text) == text, "run `python -m tools.chart_settings`"


def test_shared_settings_are_those_that_the_loader_takes_for_every_role() -> None:
    assert "tp_size" in shared_settings()
    assert "http_port" not in shared_settings()
