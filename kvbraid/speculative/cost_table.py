"""What a step costs, measured: seconds by number of sequences and window width.

Sequence counts fall into buckets (1 .. 6, then four to an octave). A cell keeps its last few
observations and stands for their median, so that a pause counts once and a growing context is
followed. Within a bucket the medians are made monotone in the width by pooling neighbours that
contradict each other. Steps of different buckets were measured with different contexts, so
measured cells are never changed by cells of other buckets.

What was not measured is estimated by a bound from above, so that no width is chosen on a hope:
between measured widths the chord; past the largest, w0, the lesser of w / w0 times its cost and of
what a larger bucket grew by. (A smaller bucket does not tell: its extra rows may have been free
because the step was bound by memory.) A bucket without measurements lies on the chord between its
neighbours, or is as dear as the larger one, or in proportion to the smaller one. `hopeful` is the
bound from below (more rows cost no less), by which one decides whether measuring is worth it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_MAX_SEQUENCES = 1 << 16
_BUCKETS = sorted(
    {1, 2, 3, 4, 5, 6} | {part << shift for shift in range(1, 15) for part in (4, 5, 6, 7)}
)
_NUM_KEPT = 15
# A first observation may be warm-up (kernels compiled, caches cold): it does not count alone, and
# of two the smaller one does.
_NUM_MEASURED = 2
_NUM_MEDIAN = 3
# Medians that moved less than this are taken as they were, so that estimates are seldom rebuilt.
_NOISE = 0.01


def bucket_of(num_sequences: int) -> int:
    """The size that stands for this many sequences, the smallest that is not smaller.

    Raises ValueError outside [1, 65536].
    """
    if not 1 <= num_sequences <= _MAX_SEQUENCES:
        raise ValueError(f"{num_sequences} sequences are outside [1, {_MAX_SEQUENCES}]")
    return _BUCKETS[bisect_left(_BUCKETS, num_sequences)]


class _Cell:
    """The last observations of a cell and what they stand for, in seconds."""

    def __init__(self) -> None:
        self.kept: deque[float] = deque(maxlen=_NUM_KEPT)
        self.typical = math.inf

    def add(self, seconds: float) -> bool:
        """Whether `typical` changed by more than noise."""
        self.kept.append(seconds)
        ordered = sorted(self.kept)
        rank = 0 if len(ordered) < _NUM_MEDIAN else (len(ordered) - 1) // 2
        if abs(ordered[rank] - self.typical) <= _NOISE * ordered[rank]:
            return False
        self.typical = ordered[rank]
        return True


class CostGrid:
    """Seconds by (number of sequences, width in [1, max_width])."""

    def __init__(self, max_width: int) -> None:
        self.max_width = max_width
        self._widths = np.arange(1, max_width + 1)
        self._cells: dict[int, dict[int, _Cell]] = {}
        self._measured: dict[int, dict[int, _Cell]] = {}
        self._bounds: dict[int, FloatArray] = {}
        self._hopes: dict[int, FloatArray] = {}

    def observe(self, num_sequences: int, width: int, seconds: float) -> None:
        """Raises ValueError when the width is outside [1, max_width] or seconds are not > 0."""
        if not 1 <= width <= self.max_width:
            raise ValueError(f"width {width} is outside [1, {self.max_width}]")
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"a step takes a positive finite time, got {seconds} s")
        bucket = bucket_of(num_sequences)
        cell = self._cells.setdefault(bucket, {}).setdefault(width, _Cell())
        has_moved = cell.add(seconds)
        if len(cell.kept) == _NUM_MEASURED:
            self._measured.setdefault(bucket, {})[width] = cell
        if has_moved or len(cell.kept) == _NUM_MEASURED:
            self._bounds.clear()
            self._hopes.clear()

    def num_observed(self, num_sequences: int, width: int) -> int:
        """Observations of this cell that are kept."""
        cell = self._cells.get(bucket_of(num_sequences), {}).get(width)
        return 0 if cell is None else len(cell.kept)

    def is_measured(self, num_sequences: int, width: int) -> bool:
        """Whether this cell was observed often enough to count."""
        return width in self._measured.get(bucket_of(num_sequences), ())

    def largest_measured(self, num_sequences: int) -> int:
        """The largest width of this bucket that is measured; 0 if none is."""
        return max(self._measured.get(bucket_of(num_sequences), ()), default=0)

    def seconds(self, num_sequences: int) -> FloatArray | None:
        """Estimate at width 1 .. max_width, read only; None while nothing is measured at all."""
        bucket = bucket_of(num_sequences)
        if bucket not in self._bounds and self._measured:
            own = bucket in self._measured
            self._bounds[bucket] = self._bounded(bucket) if own else self._between(bucket)
        return self._bounds.get(bucket)

    def hopeful(self, num_sequences: int) -> FloatArray:
        """Bound from below at width 1 .. max_width, read only; zeros while nothing is measured."""
        bucket = bucket_of(num_sequences)
        if bucket not in self._hopes:
            row = self.seconds(num_sequences)
            least = self._least(bucket)
            self._hopes[bucket] = least if row is None else np.minimum(least, row)
        return self._hopes[bucket]

    def _least(self, bucket: int) -> FloatArray:
        if bucket in self._measured:
            return self._chord(bucket)
        smaller, larger = self._neighbours(bucket)
        if smaller is not None:
            return self._chord(smaller)
        if larger is not None:
            return self._chord(larger) * (bucket / larger)
        return np.zeros(self.max_width)

    def _chord(self, bucket: int) -> FloatArray:
        """Interpolated between measured widths, constant outside of them."""
        cells = sorted(self._measured[bucket].items())
        pooled = pool_adjacent([c.typical for _, c in cells], [len(c.kept) for _, c in cells])
        return np.interp(self._widths, [width for width, _ in cells], pooled)

    def _bounded(self, bucket: int) -> FloatArray:
        row = self._chord(bucket)
        last = max(self._measured[bucket])
        if last == self.max_width:
            return row
        bound = row[last - 1] * self._widths[last:] / last
        # From a width that the larger one measured too: a chord is no bound for a difference.
        reaching = [b for b, c in self._measured.items() if last in c and max(c) > last]
        larger = min((b for b in reaching if b > bucket), default=None)
        if larger is not None:
            known = max(self._measured[larger])
            other = self._chord(larger)
            growth = row[last - 1] + other[last:known] - other[last - 1]
            bound[: known - last] = np.minimum(bound[: known - last], growth)
        row[last:] = np.minimum.accumulate(bound[::-1])[::-1]
        return row

    def _between(self, bucket: int) -> FloatArray:
        smaller, larger = self._neighbours(bucket)
        if smaller is None or larger is None:
            only = smaller if larger is None else larger
            assert only is not None
            return self._bounded(only) * max(1.0, bucket / only)
        weight = (bucket - smaller) / (larger - smaller)
        return (1.0 - weight) * self._bounded(smaller) + weight * self._bounded(larger)

    def _neighbours(self, bucket: int) -> tuple[int | None, int | None]:
        """The nearest smaller and the nearest larger bucket with measurements."""
        smaller = max((b for b in self._measured if b < bucket), default=None)
        return smaller, min((b for b in self._measured if b > bucket), default=None)


class CostTable:
    """Costs of verify steps by window width, of drafting by number of drafts, and of a first
    drafting, which tells the drafter prompts."""

    def __init__(self, max_draft_tokens: int) -> None:
        self.max_width = max_draft_tokens + 1
        self.step = CostGrid(self.max_width)
        self.draft = CostGrid(max_draft_tokens)
        self.first_draft = CostGrid(1)
        self._since_plain: dict[int, int] = {}

    def observe_step(
        self, num_sequences: int, width: int, seconds: float, *, has_prompt_rows: bool
    ) -> None:
        """One step of the target. Steps that also computed prompt rows are not comparable."""
        if has_prompt_rows:
            return
        self.step.observe(num_sequences, width, seconds)
        bucket = bucket_of(num_sequences)
        self._since_plain[bucket] = 0 if width == 1 else self._since_plain.get(bucket, 0) + 1

    def plain_seconds(self, num_sequences: int) -> float | None:
        """A step without drafts; None until it was measured in this bucket often enough."""
        if self.step.num_observed(num_sequences, 1) < _NUM_MEDIAN:
            return None
        row = self.step.seconds(num_sequences)
        assert row is not None
        return float(row[0])

    def steps_since_plain(self, num_sequences: int) -> int:
        """Observed steps of this bucket since its last one without drafts."""
        return self._since_plain.get(bucket_of(num_sequences), 0)


def profile_cells(max_sequences: int, max_width: int) -> list[tuple[int, int]]:
    """(number of sequences, width) to measure at start-up, cheapest first.

    Sizes grow fourfold and widths twofold, both with their maximum; what lies between is
    interpolated and measured in use.
    """
    sizes = _growing(max_sequences, 4)
    widths = _growing(max_width, 2)
    return sorted(
        ((b, w) for b in sizes for w in widths), key=lambda cell: (cell[0] * cell[1], cell)
    )


def pool_adjacent(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """The non-decreasing sequence closest to `values` in weighted squares (pool adjacent
    violators)."""
    pools: list[tuple[float, int, int]] = []  # mean, weight, number of values
    for value, weight in zip(values, weights, strict=True):
        size = 1
        while pools and pools[-1][0] > value:
            mean, other, count = pools.pop()
            value = (mean * other + value * weight) / (other + weight)
            weight, size = weight + other, size + count
        pools.append((value, weight, size))
    return [mean for mean, _, size in pools for _ in range(size)]


def _growing(last: int, factor: int) -> list[int]:
    values = [1]
    while values[-1] * factor < last:
        values.append(values[-1] * factor)
    return values if values[-1] == last else [*values, last]
