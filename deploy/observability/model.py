"""What a dashboard is, before it becomes Grafana's JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deploy.observability.promql import Scope

DASHBOARD = Scope(
    matchers='namespace=~"$namespace",instance=~"$instance"', window="$__rate_interval"
)
"""Of queries in dashboards: what the variables at the top of the page choose."""

RECORDED = Scope(matchers='namespace=~"$namespace"', window="")
"""Of queries that read ratios of whole namespaces, which have no instance."""

Unit = Literal[
    "short", "s", "bytes", "Bps", "percentunit", "reqps", "ops", "cps", "none", "dtdurations"
]


@dataclass(frozen=True, slots=True)
class Query:
    """One expression; the legend may use its labels as {{label}}."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One question that an operator asks, and the queries that answer it.

    question: shown as the panel's description. needs: "" if every cluster under load has data, else
    what it takes: a stripe of more than one rank, a drafter, a draft service of its own, or
    certificates.
    """

    title: str
    question: str
    unit: Unit
    queries: tuple[Query, ...]
    kind: Literal["lines", "stacked", "number"] = "lines"
    width: int = 8
    needs: Literal["", "ranks", "drafter", "draft_service", "tls"] = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A page of Grafana; name: of its file and, behind kvbraid-, its uid."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """Every panel, top to bottom."""
        return tuple(panel for row in self.rows for panel in row.panels)


def quantiles(name: str, **labels: str) -> tuple[Query, ...]:
    """Median and tail of a histogram."""
    return tuple(
        Query(DASHBOARD.quantile(q, name, **labels), f"p{round(q * 100)}")
        for q in (0.5, 0.95, 0.99)
    )


def per_label(name: str, label: str, role: str = "") -> tuple[Query, ...]:
    """Rate of a counter by one label."""
    return (Query(f"sum by ({label}) ({DASHBOARD.rate(name, role)})", f"{{{{{label}}}}}"),)
