"""One setting: its declaration on a dataclass and what the loader knows about it."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NewType

ByteSize = NewType("ByteSize", int)
"""A number of bytes; in text also with a suffix: 512KiB, 64MiB, 2GiB, 1MB."""

_OPTIONS = "kvbraid"


def setting(
    default: Any,
    description: str,
    *,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A dataclass field with the sentence, unit and accepted range that --help and errors show.

    `minimum` and `maximum` are inclusive. A list default is copied for each instance.
    """
    metadata = {_OPTIONS: Description(description, unit, minimum, maximum)}
    if isinstance(default, list):
        values = list(default)
        return dataclasses.field(default_factory=lambda: list(values), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Description:
    """What a person reads about a setting."""

    sentence: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None

    @property
    def accepted(self) -> str:
        """The range in words, empty when there is none."""
        if self.minimum is not None and self.maximum is not None:
            return f"{self.minimum} to {self.maximum}"
        if self.minimum is not None:
            return f">= {self.minimum}"
        return f"<= {self.maximum}" if self.maximum is not None else ""


@dataclass(frozen=True, slots=True)
class Setting:
    """A leaf of a config dataclass under its flat name."""

    name: str
    type: Any
    default: Any
    description: Description

    @property
    def flag(self) -> str:
        """Its command line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_list(self) -> bool:
        """Whether it holds several values."""
        return typing.get_origin(self.type) is list


def settings_of(cls: type, defaults: object | None = None) -> dict[str, Setting]:
    """Every setting of `cls`, nested sections flattened, by flat name.

    `defaults` is an instance whose values are the defaults; without it `cls()` is. Raises
    TypeError, a programming error, for a name declared twice or a field without `setting()`.
    """
    found: dict[str, Setting] = {}
    for item in _leaves(cls, defaults if defaults is not None else cls()):
        if item.name in found:
            raise TypeError(f"{cls.__name__} declares the setting {item.name} twice")
        found[item.name] = item
    return found


def build(cls: type, values: dict[str, Any]) -> Any:
    """An instance of `cls` out of flat values, one for every setting."""
    hints = typing.get_type_hints(cls)
    arguments = {
        item.name: build(hints[item.name], values)
        if dataclasses.is_dataclass(hints[item.name])
        else values[item.name]
        for item in dataclasses.fields(cls)
    }
    return cls(**arguments)


def strip_optional(annotation: Any) -> tuple[Any, bool]:
    """(`X`, True) for `X | None`, (`annotation`, False) otherwise."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [m for m in typing.get_args(annotation) if m is not type(None)]
        if len(members) == 1:
            return members[0], True
    return annotation, False


def _leaves(cls: type, defaults: object) -> Iterator[Setting]:
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        value = getattr(defaults, item.name)
        if dataclasses.is_dataclass(hints[item.name]):
            yield from _leaves(hints[item.name], value)
        elif _OPTIONS not in item.metadata:
            raise TypeError(f"{cls.__name__}.{item.name} must be declared with setting()")
        else:
            yield Setting(item.name, hints[item.name], value, item.metadata[_OPTIONS])
