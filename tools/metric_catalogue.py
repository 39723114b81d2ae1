"""Every metric as the code declares it: the one source of docs/metrics.md and of the checks of
dashboards and rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from kvbraid.telemetry.metrics import CoordinatorMetrics, DraftServiceMetrics, WorkerMetrics

SELECTOR = re.compile(r"([a-z_:][a-z0-9_:]*)\{([^{}]*)\}")
_MATCHER = re.compile(r'([a-z_]+)(=~|!~|!=|=)"([^"]*)"')


@dataclass(frozen=True, slots=True)
class DeclaredMetric:
    """name: with _total where it is a counter. values: of each label those that exist from the
    start, empty where the label is bounded by what is deployed. bounds: of a histogram."""

    name: str
    kind: str
    documentation: str
    labels: tuple[str, ...]
    values: dict[str, tuple[str, ...]]
    bounds: tuple[float, ...]
    roles: tuple[str, ...]

    @property
    def series(self) -> dict[str, tuple[str, ...]]:
        """Names of its series and their labels."""
        if self.kind != "histogram":
            return {self.name: self.labels}
        bucket = {f"{self.name}_bucket": (*self.labels, "le")}
        return bucket | {f"{self.name}_{part}": self.labels for part in ("sum", "count")}


@dataclass(frozen=True, slots=True)
class Matcher:
    """label operator "value", as in a selector."""

    label: str
    operator: str
    value: str


def registries() -> dict[str, CollectorRegistry]:
    """A fresh registry of every role."""
    return {
        "coordinator": CoordinatorMetrics().registry,
        "prefill": WorkerMetrics("prefill").registry,
        "decode": WorkerMetrics("decode").registry,
        "draft": DraftServiceMetrics().registry,
    }


def declared_metrics() -> list[DeclaredMetric]:
    """All metrics of all roles, by name."""
    found: dict[str, DeclaredMetric] = {}
    for role, registry in registries().items():
        labels = dict(_label_names(registry))
        for family in registry.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            roles = found[name].roles if name in found else ()
            given = dict.fromkeys(label for s in family.samples for label in s.labels)
            own = labels.get(family.name, tuple(given))
            found[name] = DeclaredMetric(
                name=name,
                kind=family.type,
                documentation=family.documentation,
                labels=own,
                values={label: _in_order(family, label) for label in own},
                bounds=tuple(float(bound) for bound in _in_order(family, "le")),
                roles=(*roles, role),
            )
    return [found[name] for name in sorted(found)]


def selectors(expression: str) -> Iterator[tuple[str, list[Matcher]]]:
    """Metric name and matchers of every selector with braces in a PromQL expression."""
    for name, inside in SELECTOR.findall(expression):
        yield name, [Matcher(*found) for found in _MATCHER.findall(inside)]


def _label_names(registry: CollectorRegistry) -> Iterator[tuple[str, tuple[str, ...]]]:
    for collector in registry._collector_to_names:
        if isinstance(collector, MetricWrapperBase):
            yield collector._name, tuple(collector._labelnames)
        own = getattr(collector, "own", None)
        if isinstance(own, CollectorRegistry):
            yield from _label_names(own)


def _in_order(family: Metric, label: str) -> tuple[str, ...]:
    """The values of a label, in the order of their declaration."""
    return tuple(dict.fromkeys(s.labels[label] for s in family.samples if label in s.labels))
