"""Text or TOML value -> typed setting. Strict: what does not fit is refused, never rounded."""

from __future__ import annotations

import math
import re
import typing
from typing import Any

from kvbraid.errors import ConfigError
from kvbraid.settings.fields import ByteSize, Setting, strip_optional

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_SIZE = re.compile(r"^(\d+)\s*(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?$")
_SIZE_FACTORS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base ** (power + 1)
    for power, letter in enumerate("KMGT")
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_text(item: Setting, text: str, source: str) -> Any:
    """The value of `item` written as `text` in a flag or the environment.

    `source` names the place in the error. Raises ConfigError with value and what is accepted.
    """
    if item.is_list:
        (member,) = typing.get_args(item.type)
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return [_checked(item, _from_text(member, part), part, member, source) for part in parts]
    annotation, is_optional = strip_optional(item.type)
    if is_optional and text == "":
        return None
    return _checked(item, _from_text(annotation, text), text, annotation, source)


def parse_toml(item: Setting, value: object, source: str) -> Any:
    """The value of `item` from a TOML file, where numbers and booleans have their own types."""
    if item.is_list:
        (member,) = typing.get_args(item.type)
        if not isinstance(value, list):
            raise _refusal(item, value, "a list", source)
        return [_checked(item, _from_toml(member, part), part, member, source) for part in value]
    annotation, _ = strip_optional(item.type)
    return _checked(item, _from_toml(annotation, value), value, annotation, source)


class _Misfit:
    """The text or value is not of the setting's type."""


_MISFIT = _Misfit()


def _from_text(annotation: Any, text: str) -> Any:
    if annotation is bool:
        lowered = text.lower()
        return lowered in _TRUE if lowered in _TRUE + _FALSE else _MISFIT
    if annotation is ByteSize:
        return _parse_size(text)
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            return _MISFIT
    return text


def _from_toml(annotation: Any, value: object) -> Any:
    if annotation is ByteSize and isinstance(value, str):
        return _parse_size(value)
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    expected = {ByteSize: int}.get(annotation, annotation)
    expected = str if typing.get_origin(expected) is typing.Literal else expected
    return value if type(value) is expected else _MISFIT


def _parse_size(text: str) -> int | _Misfit:
    match = _SIZE.match(text)
    return int(match[1]) * _SIZE_FACTORS[match[2] or ""] if match else _MISFIT


def _checked(item: Setting, value: Any, given: object, annotation: Any, source: str) -> Any:
    if value is _MISFIT:
        raise _refusal(item, given, describe_type(annotation), source)
    if typing.get_origin(annotation) is typing.Literal:
        if value not in typing.get_args(annotation):
            raise _refusal(item, given, describe_type(annotation), source)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = item.description.minimum, item.description.maximum
        outside = (low is not None and value < low) or (high is not None and value > high)
        if outside or not math.isfinite(value):
            raise _refusal(item, given, item.description.accepted or "a finite number", source)
    return value


def describe_type(annotation: Any) -> str:
    """What a value of `annotation` looks like, in words."""
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(str(member) for member in typing.get_args(annotation))
    if annotation is ByteSize:
        return "bytes as 1048576 or 1MiB"
    return {bool: "true or false", int: "a whole number", float: "a number"}.get(annotation, "text")


def _refusal(item: Setting, given: object, accepted: str, source: str) -> ConfigError:
    return ConfigError(f"{source}: {item.name} is {given!r}, accepted: {accepted}")
