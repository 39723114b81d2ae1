"""PromQL, as far as dashboards and rules here need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ROLE_OF = "kvbraid_process_info"


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose series a query takes, and over which window it takes rates.

    matchers: added to every selector, as `namespace="prod"`; empty takes all.
    """

    matchers: str
    window: str

    def series(self, name: str, of_role: str = "", **labels: str) -> str:
        """The series of a metric. A label value that begins with ~ or ! brings its own operator:
        `outcome="~stop|length"`, `outcome="!~stop|length"`. of_role: of processes of one role only,
        because workers of all roles have the same metrics."""
        selector = f"{name}{{{self._matchers(labels)}}}"
        return self._of_role(selector, of_role)

    def rate(self, name: str, of_role: str = "", window: str = "", **labels: str) -> str:
        """Increase a second of each series of a counter."""
        selector = f"{name}{{{self._matchers(labels)}}}"
        return self._of_role(f"rate({selector}[{window or self.window}])", of_role)

    def quantile(
        self, q: float, name: str, by: Sequence[str] = (), of_role: str = "", **labels: str
    ) -> str:
        """A quantile of a histogram, for each combination of the labels `by`."""
        rates = self.rate(f"{name}_bucket", of_role, **labels)
        return f"histogram_quantile({q}, sum by ({', '.join(('le', *by))}) ({rates}))"

    def mean(self, name: str, by: Sequence[str] = (), of_role: str = "", **labels: str) -> str:
        """The mean of a histogram, for each combination of the labels `by`."""
        total = total_by(self.rate(f"{name}_sum", of_role, **labels), by)
        return f"{total} / {total_by(self.rate(f'{name}_count', of_role, **labels), by)}"

    def _matchers(self, labels: dict[str, str]) -> str:
        own = [_matcher(name, value) for name, value in labels.items()]
        return ",".join(filter(None, (*own, self.matchers)))

    def _of_role(self, expression: str, role: str) -> str:
        if not role:
            return expression
        info = f"{_ROLE_OF}{{{self._matchers({'role': role})}}}"
        return f"({expression} and on (job, instance) {info})"


def total_by(expression: str, by: Sequence[str] = ()) -> str:
    """Sum over everything but the labels `by`."""
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def _matcher(name: str, value: str) -> str:
    if value.startswith("!~"):
        return f'{name}!~"{value[2:]}"'
    if value.startswith("~"):
        return f'{name}=~"{value[1:]}"'
    return f'{name}="{value}"'
