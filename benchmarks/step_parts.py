"""What the parts of a decode worker's steps took, by its own metrics."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from operator import add, sub

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.report import BenchmarkRow

_PARTS = "kvbraid_speculation_step_seconds"
_STEPS = "kvbraid_engine_step_seconds"
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class StepParts:
    """Sums over steps, in seconds: of drafting and verifying in steps with windows, and of all
    steps."""

    draft_s: float = 0.0
    verify_s: float = 0.0
    num_windows: float = 0.0
    step_s: float = 0.0
    num_steps: float = 0.0

    def __add__(self, other: StepParts) -> StepParts:
        return StepParts(*map(add, astuple(self), astuple(other)))

    def since(self, earlier: StepParts) -> StepParts:
        """What came after `earlier`, of the same worker."""
        return StepParts(*map(sub, astuple(self), astuple(earlier)))


@dataclass(frozen=True, slots=True)
class PairedParts:
    """Of a plain cluster and of one with a drafter, which answered the same prompts."""

    plain: StepParts = StepParts()
    drafted: StepParts = StepParts()

    def __add__(self, other: PairedParts) -> PairedParts:
        return PairedParts(self.plain + other.plain, self.drafted + other.drafted)


def parts_of(page: str) -> StepParts:
    """page: what `/metrics` of a decode worker says."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(page):
        if family.name in (_PARTS, _STEPS):
            for name, labels, value, *_ in family.samples:
                key = (name, labels.get("part", ""))
                found[key] = found.get(key, 0.0) + value
    return StepParts(
        draft_s=found.get((f"{_PARTS}_sum", "draft"), 0.0),
        verify_s=found.get((f"{_PARTS}_sum", "verify"), 0.0),
        num_windows=found.get((f"{_PARTS}_count", "verify"), 0.0),
        step_s=found.get((f"{_STEPS}_sum", ""), 0.0),
        num_steps=found.get((f"{_STEPS}_count", ""), 0.0),
    )


def read_parts(address: str) -> StepParts:
    """address: where a decode worker's metrics are."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as answer:
        return parts_of(answer.read().decode())


def part_rows(case: str, parts: PairedParts) -> Iterator[BenchmarkRow]:
    """What drafting and verifying took in a step with windows, on average, beside a plain
    cluster's step. None where nothing was drafted."""
    plain, drafted = parts.plain, parts.drafted
    if not drafted.num_windows or not plain.num_steps:
        return
    step_ms = 1000 * plain.step_s / plain.num_steps
    for what, seconds in (("drafting", drafted.draft_s), ("verifying", drafted.verify_s)):
        ms = 1000 * seconds / drafted.num_windows
        title = f"{case}: {what}, in a step that drafts / a plain cluster's step (ms)"
        yield BenchmarkRow(title, ms, step_ms, ms / step_ms, None, True)
