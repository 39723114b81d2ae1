"""Reads a Dockerfile: stages, their instructions, variables. The part of the syntax that ours uses.

Comments, line continuations, ARG before the first FROM and `${NAME}`, `$NAME`, `${NAME:-default}`
are understood; heredocs and the escape directive are refused.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)(?::-(?P<default>[^}]*))?\}|(?P<plain>\w+))")
_KEYWORD = re.compile(r"[A-Z]+$")


class DockerfileError(ValueError):
    """The file has something that this reader does not know; the message names the line."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; `text` is what follows the keyword, continuation lines joined."""

    keyword: str
    text: str
    line: int

    def flags(self) -> dict[str, str]:
        """Leading --name=value words."""
        found = {}
        for word in self.text.split():
            if not word.startswith("--"):
                break
            name, _, value = word[2:].partition("=")
            found[name] = value
        return found

    def body(self) -> str:
        """`text` without its leading flags."""
        return re.sub(r"^(--\S+\s+)+", "", self.text)

    def words(self) -> list[str]:
        """The body as the shell or a JSON array would split it."""
        body = self.body()
        if body.startswith("["):
            return [str(word) for word in json.loads(body)]
        return shlex.split(body)

    def pairs(self) -> dict[str, str]:
        """NAME=value of ENV, ARG and LABEL; an ARG without a value has ""."""
        return {name: value for name, _, value in (w.partition("=") for w in self.words())}


@dataclass(slots=True)
class Stage:
    """FROM `base` AS `name` and what follows."""

    name: str
    base: str
    line: int
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, keyword: str) -> list[Instruction]:
        """Its own instructions of one kind, not those of its base."""
        return [item for item in self.instructions if item.keyword == keyword]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """Global arguments and stages by name, in file order."""

    arguments: dict[str, str]
    stages: dict[str, Stage]

    def chain(self, target: str) -> list[Stage]:
        """The stages that make up `target`, the one on the external image first."""
        stage = self.stages[target]
        return [*(self.chain(stage.base) if stage.base in self.stages else []), stage]

    def needed(self, target: str) -> list[Stage]:
        """Every stage that building `target` runs, in file order."""
        wanted = {stage.name for stage in self.chain(target)}
        for stage in self.chain(target):
            for copy in stage.of("COPY"):
                if (source := copy.flags().get("from")) is not None:
                    wanted |= {item.name for item in self.needed(source)}
        return [stage for name, stage in self.stages.items() if name in wanted]


def read_dockerfile(path: Path) -> Dockerfile:
    """Parse `path`. Raises DockerfileError for what it does not know."""
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for item in _instructions(path):
        if item.keyword == "FROM":
            base, name = _from(item)
            current = Stage(name, expand(base, arguments), item.line)
            stages[name] = current
        elif current is not None:
            current.instructions.append(item)
        elif item.keyword == "ARG":
            arguments |= item.pairs()
        else:
            raise DockerfileError(f"line {item.line}: {item.keyword} before FROM")
    return Dockerfile(arguments, stages)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`text` with its variables replaced; an unknown one is empty, as Docker does it."""

    def value(match: re.Match[str]) -> str:
        name = match["braced"] or match["plain"]
        return variables.get(name) or match["default"] or ""

    return _VARIABLE.sub(value, text)


def _instructions(path: Path) -> Iterator[Instruction]:
    parts: list[str] = []
    start = 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("#") or (not stripped and not parts):
            continue
        start = start if parts else number
        parts.append(stripped.removesuffix("\\").strip())
        if not stripped.endswith("\\"):
            yield _instruction(" ".join(parts), start)
            parts = []
    if parts:
        raise DockerfileError(f"line {start}: the file ends inside an instruction")


def _instruction(text: str, line: int) -> Instruction:
    keyword, _, rest = text.partition(" ")
    if not _KEYWORD.match(keyword):
        raise DockerfileError(f"line {line}: {keyword!r} must be an instruction in capitals")
    if "<<" in rest:
        raise DockerfileError(f"line {line}: heredocs are not read")
    return Instruction(keyword, rest.strip(), line)


def _from(item: Instruction) -> tuple[str, str]:
    match item.body().split():
        case [base, "AS", name]:
            return base, name
    raise DockerfileError(f"line {item.line}: FROM must be FROM image AS name")
