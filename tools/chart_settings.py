"""`python -m tools.chart_settings`: the settings part of the chart's values.schema.json.

Values below `settings` are the services' own settings, so their schema is made out of them:
`definitions.shared_settings` and `definitions.ROLE_settings` are replaced, the rest stays; so is
`definitions.slo`, the thresholds of the alerts. A test fails while the file is older than they are.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import typing
from pathlib import Path
from typing import Any

from kvbraid.settings import ROLES, ByteSize
from kvbraid.settings.fields import Setting, settings_of, strip_optional
from kvbraid.settings.sections import SHARED_SECTIONS

CHART = Path(__file__).parents[1] / "deploy/helm/kvbraid"
SCHEMA = CHART / "values.schema.json"
SLOS = CHART / "files/alerts/slo.json"
_BYTES_PATTERN = r"^\d+\s*(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?$"
# A Service, a probe or a network policy needs to know the port, so the system cannot choose it.
_FIXED_PORTS = ("port", "http_port", "metrics_port", "health_port", "step_port")

JsonSchema = dict[str, Any]


def role_settings(role: str) -> dict[str, Setting]:
    """The settings of a role by flat name; the shared ones of a role that has no service yet."""
    package = role if role == "coordinator" else f"{role}_service"
    if importlib.util.find_spec(package) is None:
        return shared_settings()
    config = importlib.import_module(f"{package}.config")
    return settings_of(getattr(config, f"{role.capitalize()}Config"))


def shared_settings() -> dict[str, Setting]:
    """The settings that may stand above the role tables of a config file."""
    return {
        name: item for section in SHARED_SECTIONS for name, item in settings_of(section).items()
    }


def definitions() -> dict[str, JsonSchema]:
    """What the file's `definitions` must say about settings and thresholds."""
    tables = {"shared": shared_settings()} | {role: role_settings(role) for role in ROLES}
    found = {f"{name}_settings": _table_schema(table) for name, table in tables.items()}
    return found | {"slo": _slo_schema(json.loads(SLOS.read_text(encoding="utf-8")))}


def refreshed(text: str) -> str:
    """The schema file `text` with the settings as the code has them now."""
    schema = json.loads(text)
    schema["definitions"] |= definitions()
    return json.dumps(schema, indent=2) + "\n"


def _table_schema(table: dict[str, Setting]) -> JsonSchema:
    properties = {name: _value_schema(item) for name, item in sorted(table.items())}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _slo_schema(slos: dict[str, Any]) -> JsonSchema:
    """A threshold of a histogram must be one of its buckets."""
    properties: dict[str, JsonSchema] = {}
    for key, slo in slos.items():
        properties[key] = {"description": slo["description"], "type": "number", "minimum": 0}
        if slo["accepted"]:
            properties[key]["enum"] = slo["accepted"]
    return {
        "type": "object",
        "additionalProperties": False,
        "required": sorted(properties),
        "properties": properties,
    }


def _value_schema(item: Setting) -> JsonSchema:
    schema: JsonSchema = {"description": item.description.sentence}
    if item.is_list:
        (member,) = typing.get_args(item.type)
        return schema | {"type": "array", "items": _type_schema(item, member)}
    return schema | _type_schema(item, strip_optional(item.type)[0])


def _type_schema(item: Setting, annotation: Any) -> JsonSchema:
    if typing.get_origin(annotation) is typing.Literal:
        return {"type": "string", "enum": list(typing.get_args(annotation))}
    if annotation is bool:
        return {"type": "boolean"}
    if annotation is str:
        return {"type": "string"}
    low = 1 if item.name in _FIXED_PORTS else item.description.minimum
    bounds = {"minimum": low, "maximum": item.description.maximum}
    number = {key: bound for key, bound in bounds.items() if bound is not None}
    if annotation is ByteSize:
        # Values read 1073741824 and "1GiB" alike; the service checks the range of text.
        text = {"type": "string", "pattern": _BYTES_PATTERN}
        return {"anyOf": [{"type": "integer"} | number, text]}
    return {"type": "integer" if annotation is int else "number"} | number


def main() -> None:
    """Bring the file up to date."""
    SCHEMA.write_text(refreshed(SCHEMA.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
