"""What a rule is, and how a file of rules is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deploy.observability.promql import Scope, total_by
from deploy.observability.rules.slo import RUNBOOK_URL, SELECTOR

RULES = Scope(matchers=SELECTOR, window="5m")


def whole(expression: str) -> str:
    """Sum over a release: one Prometheus may watch several, in namespaces of their own."""
    return total_by(expression, ("namespace",))


@dataclass(frozen=True, slots=True)
class Recording:
    """A query whose result is kept as a series of its own."""

    record: str
    expr: str

    def fields(self) -> Iterator[str]:
        """Lines of YAML."""
        yield f"record: {self.record}"
        yield f"expr: {_quoted(self.expr)}"


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition that someone must know of. page: wakes a person; ticket: within the day.

    summary: one sentence; may use {{ $labels.x }} and {{ $value }}. hold: how long the condition
    must last.
    """

    name: str
    expr: str
    hold: str
    severity: Literal["page", "ticket"]
    summary: str

    @property
    def fragment(self) -> str:
        """Anchor of its section in docs/runbook.md."""
        return self.name.lower()

    def fields(self) -> Iterator[str]:
        """Lines of YAML."""
        yield f"alert: {self.name}"
        yield f"expr: {_quoted(self.expr)}"
        yield f"for: {self.hold}"
        yield "labels:"
        yield f"  severity: {self.severity}"
        yield "annotations:"
        yield f"  summary: {_quoted(self.summary)}"
        yield f"  runbook_url: {_quoted(f'{RUNBOOK_URL}#{self.fragment}')}"


@dataclass(frozen=True, slots=True)
class RuleGroup:
    """Rules that are evaluated together, in order."""

    name: str
    interval: str
    rules: tuple[Recording | Alert, ...]

    def to_yaml(self) -> str:
        """A file with this group alone, in Prometheus' format."""
        lines = [
            "groups:",
            f"  - name: {self.name}",
            f"    interval: {self.interval}",
            "    rules:",
        ]
        for rule in self.rules:
            first, *others = rule.fields()
            lines += [f"      - {first}", *(f"        {line}" for line in others)]
        return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    # A JSON string is a YAML string, whatever is in it.
    return json.dumps(text, ensure_ascii=False)
