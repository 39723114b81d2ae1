"""The jinja sandbox of chat templates.

A template is data from a checkpoint: it sees only its variables and the names below, cannot reach
Python attributes, and is stopped when it takes too many steps, too long, or makes too much text.
Filters and methods are allow-lists because several usual ones can be asked for gigabytes.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from jinja2 import TemplateError, Undefined, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARS = 16_000_000
"""Longest rendered prompt and longest intermediate value."""
MAX_STEPS = 2_000_000
"""Most template lines and Python calls executed for one prompt."""
MAX_RENDER_S = 5.0
"""Longest rendering."""

_FILTER_NAMES = (
    "abs capitalize count d default dictsort first float int items last length list lower map "
    "max min reject rejectattr reverse round safe select selectattr sort title trim unique upper"
)
# Methods of strings, lists and dicts that cannot make more than they are given.
_METHOD_NAMES = (
    "capitalize count endswith find get index isalnum isalpha isdigit islower isspace isupper "
    "items keys lower lstrip partition removeprefix removesuffix replace rfind rpartition "
    "rsplit rstrip split splitlines startswith strip title upper values"
)
_SAFE_METHODS = frozenset(_METHOD_NAMES.split())
_PLAIN_TYPES = (str, bytes, int, float, list, tuple, dict)
_SCALARS = (str, int, float, bool, type(None), Undefined)
_FILE_NAME = "<template>"


class TemplateLimitError(TemplateError):
    """The template took more steps, time or text than it may."""


def check_size(size: int) -> None:
    """Raises TemplateLimitError when a value of `size` characters or items is too large."""
    if size > MAX_RENDERED_CHARS:
        raise TemplateLimitError(f"made more than {MAX_RENDERED_CHARS} characters or items")


class StepLimit:
    """Counts what this thread runs on behalf of a template; raises TemplateLimitError at the
    limits."""

    def __init__(self) -> None:
        self._steps = 0
        self._end = time.monotonic() + MAX_RENDER_S
        self._previous: Callable[..., Any] | None = None

    def __enter__(self) -> None:
        self._previous = sys.gettrace()
        sys.settrace(self._on_call)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        sys.settrace(self._previous)

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        self._step()
        return self._on_line if frame.f_code.co_filename == _FILE_NAME else None

    def _on_line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        self._step()
        return self._on_line

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TemplateLimitError(f"took more than {MAX_STEPS} steps")
        if self._steps % 1024 == 0 and time.monotonic() > self._end:
            raise TemplateLimitError(f"took longer than {MAX_RENDER_S} s")


class _BoundedConcatGenerator(CodeGenerator):
    """Compiles `a ~ b` to a call whose result is bounded."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat_values((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox: no attributes, no unknown filters, no value larger than the limit."""

    code_generator_class = _BoundedConcatGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=["jinja2.ext.loopcontrols"],
            finalize=_to_scalar,
        )
        plain = {name: FILTERS[name] for name in _FILTER_NAMES.split()}
        self.filters = plain | {
            "indent": _indent,
            "join": _join,
            "replace": _replace,
            "string": lambda value: str(_to_scalar(value)),
            "tojson": _to_json,
        }
        self.globals = {
            "range": self.globals["range"],
            "namespace": self.globals["namespace"],
            "dict": dict,
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        }

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Joins the output of a macro or a set block."""
        return _join_bounded("", list(pieces))

    @staticmethod
    def concat_values(values: tuple[Any, ...]) -> str:
        """The `~` operator."""
        return _join_bounded("", [str(_to_scalar(value)) for value in values])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses operations whose result would be huge before they run."""
        if operator == "%" and not isinstance(left, (int, float)):
            raise SecurityError("the % operator is for numbers only")
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            check_size(len(left) + len(right))
        if operator == "*":
            _check_product(left, right)
        if operator == "**":
            _check_power(left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Of plain values only known methods; of jinja's own objects what the sandbox allows."""
        if isinstance(obj, _PLAIN_TYPES) and attr not in _SAFE_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """No special case for str.format: it is no safe method, a width can be gigabytes."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Bounds str.replace; everything else that may be called is bounded already."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and getattr(__obj, "__name__", "") == "replace":
            return _replace(owner, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def _to_scalar(value: Any) -> Any:
    """What may be printed: a nested list could print itself exponentially often."""
    if isinstance(value, _SCALARS):
        return value
    raise SecurityError(f"a {type(value).__name__} is not printable; use the tojson filter")


def _check_product(left: Any, right: Any) -> None:
    for sequence, count in ((left, right), (right, left)):
        if hasattr(sequence, "__len__") and isinstance(count, int):
            check_size(len(sequence) * count)
    if isinstance(left, int) and isinstance(right, int):
        check_size(left.bit_length() + right.bit_length())


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        check_size(left.bit_length() * abs(right))


def _join_bounded(separator: str, pieces: list[str]) -> str:
    check_size(sum(map(len, pieces)) + len(separator) * len(pieces))
    return separator.join(pieces)


def _join(values: Iterable[Any], d: str = "") -> str:
    return _join_bounded(str(_to_scalar(d)), [str(_to_scalar(value)) for value in values])


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    text = str(_to_scalar(text))
    hits = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    check_size(len(text) + hits * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    prefix = width if isinstance(width, str) else " " * min(int(width), 1000)
    lines = str(_to_scalar(text)).split("\n")
    check_size(sum(map(len, lines)) + len(lines) * (1 + len(prefix)))
    padded = [line if not line and not blank else prefix + line for line in lines]
    return "\n".join(padded if first else [lines[0], *padded[1:]])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=None if indent is None else min(indent, 100),
        separators=separators,
        sort_keys=sort_keys,
    )
    pieces: list[str] = []
    size = 0
    for piece in encoder.iterencode(value):
        size += len(piece)
        pieces.append(piece)
        check_size(size)
    return "".join(pieces)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
