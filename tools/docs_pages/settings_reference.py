"""docs/reference/configuration.md out of the settings classes of every role."""

from __future__ import annotations

import dataclasses
import importlib
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvbraid.cli import SERVICES
from kvbraid.settings.fields import Setting, settings_of, strip_optional
from kvbraid.settings.parsing import describe_type

_INTRODUCTION = """\
# Configuration

Generated from the settings classes by `make gen-docs`; a test compares it.

A service reads its settings once, when it starts. A setting has one name, here `page_size`, and
three places, in this order of weight:

| place | for every role | for one role |
|---|---|---|
| flag | | `kvbraid decode --page-size=16` |
| environment | `KVBRAID_PAGE_SIZE=16` | `KVBRAID_DECODE_PAGE_SIZE=16` |
| TOML file (`--config FILE` or `KVBRAID_CONFIG`) | `page_size = 16` at the top | \
`page_size = 16` below `[decode]` |

The role's own outweighs the one for every role. A name that no role has is refused, and so is a
value outside its range; the message names the place, the value and what is accepted, and the
process ends with code 2. A shared name that this role does not have is skipped, so that one file
serves all roles. In text, lists have commas between their parts, sizes may have a suffix
(`16MiB`), yes-or-no settings also have a `--no-` flag. `KVBRAID_MODELS` is no setting: it is where
`kvbraid model pull` keeps models.
"""


@dataclass(frozen=True, slots=True)
class _Section:
    """Settings that belong together, and their defaults by role."""

    cls: type
    instances: dict[str, Any]

    def settings(self, role: str) -> dict[str, Setting]:
        """By name, with the role's defaults."""
        return settings_of(self.cls, self.instances[role])


def settings_reference() -> str:
    """The page for every role that the `kvbraid` command can run."""
    sections: dict[str, _Section] = {}
    for role, module in SERVICES.items():
        config = _config_class(role, module)()
        for item in dataclasses.fields(config):
            value = getattr(config, item.name)
            section = sections.setdefault(type(value).__name__, _Section(type(value), {}))
            section.instances[role] = value
    roles = ", ".join(f"`{role}`" for role in SERVICES)
    parts = [_INTRODUCTION, f"Roles: {roles}.\n"]
    parts += [_section(section) for _, section in sorted(sections.items(), key=_shared_first)]
    return "\n".join(parts)


def _config_class(role: str, module: str) -> type:
    found: type = getattr(importlib.import_module(f"{module}.config"), f"{role.title()}Config")
    return found


def _shared_first(item: tuple[str, _Section]) -> tuple[int, str]:
    name, section = item
    return -len(section.instances), name


def _section(section: _Section) -> str:
    title = re.sub(r"(?<!^)(?=[A-Z])", " ", section.cls.__name__.removesuffix("Settings"))
    used_by = ", ".join(f"`{role}`" for role in section.instances)
    sentence = " ".join((section.cls.__doc__ or "").split())
    rows = "\n".join(_rows(section))
    head = "| setting | type | default | accepted | meaning |\n|---|---|---|---|---|"
    return f"## {title}\n\n{sentence} Read by {used_by}.\n\n{head}\n{rows}\n"


def _rows(section: _Section) -> Iterator[str]:
    by_role = {role: section.settings(role) for role in section.instances}
    first = next(iter(by_role.values()))
    for name, item in first.items():
        defaults = {role: settings[name] for role, settings in by_role.items()}
        meaning = item.description.sentence
        cells = (f"`{name}`", _type(item), _defaults(defaults), _accepted(item), meaning)
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _type(item: Setting) -> str:
    annotation, is_optional = strip_optional(item.type)
    if item.is_list:
        (member,) = typing.get_args(item.type)
        words = f"list of {describe_type(member)}"
    else:
        words = describe_type(annotation).split(" as ")[0]
    words = "choice" if words.startswith("one of") else words
    unit = item.description.unit
    words = f"{words}, {unit}" if unit and unit != words else words
    return f"{words}, may be empty" if is_optional else words


def _accepted(item: Setting) -> str:
    annotation, _ = strip_optional(item.type)
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{member}`" for member in typing.get_args(annotation))
    return item.description.accepted


def _defaults(by_role: dict[str, Setting]) -> str:
    shown = {role: _value(item) for role, item in by_role.items()}
    if len(set(shown.values())) == 1:
        return next(iter(shown.values()))
    return ", ".join(f"{text} ({role})" for role, text in shown.items())


def _value(item: Setting) -> str:
    value = item.default
    if value in ("", None, []):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{','.join(map(str, value))}`" if item.is_list else f"`{value}`"
