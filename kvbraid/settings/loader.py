"""Read a config dataclass from flags, environment, file and defaults, in this order of weight."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from kvbraid.errors import ConfigError
from kvbraid.settings.fields import Setting, build, settings_of, strip_optional
from kvbraid.settings.parsing import describe_type, parse_text, parse_toml
from kvbraid.settings.sections import SHARED_SECTIONS

ROLES = ("coordinator", "prefill", "decode", "draft")
_PREFIX = "KVBRAID_"
# Names with our prefix that are no settings: the file itself and where models are kept.
_OTHER_NAMES = frozenset({"KVBRAID_CONFIG", "KVBRAID_MODELS"})
_CONFIG = "config"

Config = TypeVar("Config")


def load_settings(
    cls: type[Config],
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    config_file: str | Path | None = None,
    *,
    role: str,
) -> Config:
    """An instance of the frozen dataclass `cls` for a process of `role`.

    argv: flags without the program name; None: this process's. environ: None: this process's.
    config_file: a TOML file, when neither --config nor KVBRAID_CONFIG names one. Keys of the
    file's top level are for every role, those of its `[decode]` (...) table for one; likewise
    KVBRAID_DECODE_PORT outweighs KVBRAID_PORT. A shared key that this role does not have is
    skipped, any other unknown key is refused. Raises ConfigError naming key, value and what is
    accepted. `--help` prints every setting with unit and default, then exits.
    """
    if role not in ROLES:
        raise ValueError(f"role is {role!r}, accepted: {', '.join(ROLES)}")
    environ = os.environ if environ is None else environ
    known = settings_of(cls)
    flags = vars(_parser(cls, role, known).parse_args(argv))
    path = flags.pop(_CONFIG) or environ.get("KVBRAID_CONFIG") or config_file
    values = {item.name: item.default for item in known.values()}
    if path:
        values |= _from_file(Path(path), role, known)
    values |= _from_environment(environ, role, known)
    values |= _from_flags(flags, known)
    config: Config = build(cls, values)
    return config


def models_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where `kvbraid model pull` keeps models: KVBRAID_MODELS or ~/.cache/kvbraid/models."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("KVBRAID_MODELS") or Path.home() / ".cache" / "kvbraid" / "models")


class _Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}")


def _parser(cls: type, role: str, known: Mapping[str, Setting]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"kvbraid {role}",
        description=(cls.__doc__ or "").strip(),
        epilog=f"Every setting is also an environment variable: --port is {_PREFIX}{role.upper()}"
        f"_PORT or {_PREFIX}PORT; and a key of the TOML file.",
        allow_abbrev=False,
    )
    parser.add_argument(f"--{_CONFIG}", metavar="FILE", help="TOML file with settings.")
    for item in known.values():
        _add_flag(parser, item)
    return parser


def _add_flag(parser: argparse.ArgumentParser, item: Setting) -> None:
    annotation, _ = strip_optional(item.type)
    options: dict[str, Any] = {"action": "append", "default": None, "dest": item.name}
    if annotation is bool:
        options |= {"nargs": "?", "const": "true", "metavar": "BOOL"}
        parser.add_argument(
            "--no-" + item.flag[2:], action="append_const", const="false", dest=item.name,
            default=None, help=argparse.SUPPRESS,
        )  # fmt: skip
    else:
        options["metavar"] = item.description.unit.upper() or "VALUE"
    parser.add_argument(item.flag, help=_help_text(item, annotation), **options)


def _from_flags(
    flags: Mapping[str, list[str] | None], known: Mapping[str, Setting]
) -> dict[str, Any]:
    """A list takes every occurrence of its flag, anything else the last one."""
    return {
        name: parse_text(
            known[name],
            ",".join(texts) if known[name].is_list else texts[-1],
            f"flag {known[name].flag}",
        )
        for name, texts in flags.items()
        if texts
    }


def _help_text(item: Setting, annotation: Any) -> str:
    default = ",".join(map(str, item.default)) if item.is_list else item.default
    notes = [f"default: {'none' if default in ('', None) else default}"]
    if item.description.unit:
        notes[0] += f" {item.description.unit}"
    if item.description.accepted:
        notes.append(item.description.accepted)
    if describe_type(annotation).startswith("one of"):
        notes.append(describe_type(annotation))
    text = f"{item.description.sentence} [{'; '.join(notes)}]"
    return text.replace("%", "%%")


def _shared_names() -> frozenset[str]:
    return frozenset(name for section in SHARED_SECTIONS for name in settings_of(section))


def _from_environment(
    environ: Mapping[str, str], role: str, known: Mapping[str, Setting]
) -> dict[str, Any]:
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key in sorted(key for key in environ if key.startswith(_PREFIX)):
        name = key[len(_PREFIX) :].lower()
        prefix = next((r for r in ROLES if name.startswith(f"{r}_")), None)
        if key in _OTHER_NAMES:
            continue
        if name in known:
            shared[name] = parse_text(known[name], environ[key], f"environment {key}")
        elif prefix == role and name[len(role) + 1 :] in known:
            field = name[len(role) + 1 :]
            own[field] = parse_text(known[field], environ[key], f"environment {key}")
        elif name in _shared_names():
            continue  # such as draft_worker, which is no setting worker of the role draft
        elif prefix == role:
            raise ConfigError(f"environment {key}: {role} has no setting {name[len(role) + 1 :]}")
        elif prefix is None:
            raise ConfigError(f"environment {key}: there is no setting {name}")
    return shared | own


def _from_file(path: Path, role: str, known: Mapping[str, Setting]) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"config file {path}: {error}") from error
    top = {key: value for key, value in document.items() if not _is_role_table(key, value)}
    table = document.get(role, {}) if _is_role_table(role, document.get(role)) else {}
    values = dict(_parse_table(path, "", top, known, skip=_shared_names()))
    return values | dict(_parse_table(path, f"[{role}] ", table, known, skip=frozenset()))


def _is_role_table(key: str, value: object) -> bool:
    return key in ROLES and isinstance(value, dict)


def _parse_table(
    path: Path,
    place: str,
    table: Mapping[str, Any],
    known: Mapping[str, Setting],
    skip: frozenset[str],
) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if key in known:
            yield key, parse_toml(known[key], value, f"config file {path}: {place}{key}")
        elif key not in skip:
            raise ConfigError(f"config file {path}: there is no setting {place}{key}")
