"""What a decode attention layer over c ranks would cost, from one-GPU and two-GPU measurements.

A layer of DCP c: local time of all H heads over L / c keys, plus the exchange.
A layer of TP c: local time of H / c heads over all L keys (MLA: every rank reads the whole latent).

Local time (attention_h200.json; one GPU and TP 2 of exchange_h200.json): straight lines between the
measured points of a head count, over B * keys. Batch and length count only by their product, and
points of equal product by their mean. Below the least and above the most measured keys the outer
line goes on. A head count that attention_h200.json lacks costs what the next larger one costs: so
fewer than 16 heads cost what 16 cost, as they do for 8 heads of TP 2.

Exchange (exchange_h200.json, rows of the layer's value width): latency + bytes * time a byte,
fitted by least squares of the relative error over all head counts and batches at c = 2. With c
ranks a rank sends (c - 1) pieces of B * (H / c) * width model-dtype values. Latency is bounded from
both sides: "peers in parallel" takes that of one peer, "peers in turn" c - 1 times it. No link to
more than one peer was ever measured.

Ignored: the query gather (q is replicated), output projection, KV append, the wait for the slowest
of c ranks (at c = 2 it is inside the measured times), contention in the switch, uneven lengths and
stripes. The merge of local splits is counted twice, in the local time and in the exchange; together
with the wait, the check against the measured c = 2 layers says what is left of that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.result_rows import ResultRows

EXCHANGES = ("fused", "a2a", "ag_rs")
WIDTH, ITEM_BYTES = 512, 2
PEERS = ("parallel", "turn")

_LOCAL = r"mla (\d+) heads, (\d+) x (\d+)K: / floor"
_TP = r"layer mla (\d+) heads, (\d+) x (\d+)K: one GPU / tp 2"
_EXCHANGE = rf"(\d+) heads of {WIDTH}, batch (\d+), \d+ splits, \d+ KiB: {{}}"


@dataclass(frozen=True)
class Line:
    """Microseconds of one exchange at c = 2: latency_us + bytes sent * us_per_byte."""

    latency_us: float
    us_per_byte: float

    @staticmethod
    def fit(points: Sequence[tuple[float, float]]) -> Line:
        """Least squares of the relative error of (bytes, us) points."""
        weights = [1 / us**2 for _, us in points]
        total = sum(weights)
        mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
        mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
        rows = list(zip(weights, points, strict=True))
        covariance = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in rows)
        slope = covariance / sum(w * (x - mean_x) ** 2 for w, (x, _) in rows)
        return Line(mean_y - slope * mean_x, slope)


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """On the straight line of the two points around x; beyond the ends on the outer one.

    points: (x, y) in the order of x, two or more.
    """
    after = next((i for i, (right, _) in enumerate(points) if x <= right), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(1, after) - 1], points[max(1, after)]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _mean_points(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """One point an x, with the mean of its y."""
    by_x: dict[float, list[float]] = defaultdict(list)
    for x, y in points:
        by_x[x].append(y)
    return [(x, sum(ys) / len(ys)) for x, ys in sorted(by_x.items())]


@dataclass(frozen=True)
class CostModel:
    """local: of each measured head count (B * keys, us), ascending. lines: of each exchange."""

    local: dict[int, list[tuple[float, float]]]
    lines: dict[str, Line]

    @staticmethod
    def from_results(attention: ResultRows, exchange: ResultRows) -> CostModel:
        """From the rows that benchmarks/attention.py and benchmarks/exchange.py write."""
        local: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for match, row in attention.matching(_LOCAL):
            heads, batch, context = map(int, match.groups())
            local[heads].append((batch * context * 1024, row.ours))
        for match, row in exchange.matching(_TP):
            heads, batch, context = map(int, match.groups())
            for measured, time_us in ((heads, row.peer), (heads // 2, row.ours)):
                if measured in local:
                    local[measured].append((batch * context * 1024, time_us))
        points: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for case, name in (("fused / a2a", "fused"), ("a2a / ag_rs", "a2a")):
            for match, row in exchange.matching(_EXCHANGE.format(case)):
                num_bytes = bytes_sent(int(match[1]), int(match[2]), 2)
                points[name].append((num_bytes, row.ours))
                if name == "a2a":
                    points["ag_rs"].append((num_bytes, row.peer))
        return CostModel(
            {heads: _mean_points(of_heads) for heads, of_heads in local.items()},
            {name: Line.fit(points[name]) for name in EXCHANGES},
        )

    def local_us(self, heads: int, num_keys: float) -> float:
        """Decode attention of `heads` heads over num_keys = B * keys a sequence, on one GPU."""
        measured = min((h for h in self.local if h >= heads), default=None)
        if measured is None:
            raise ValueError(f"{heads} heads are more than the {max(self.local)} measured")
        return interpolate(self.local[measured], num_keys)

    def exchange_us(self, name: str, heads: int, batch: int, size: int, peers: str) -> float:
        """Of `heads` heads in all over `size` ranks. peers: one of PEERS."""
        line = self.lines[name]
        latency = line.latency_us * (size - 1 if peers == "turn" else 1)
        return latency + line.us_per_byte * bytes_sent(heads, batch, size)

    def tp_us(self, heads: int, batch: int, context: int, size: int) -> float:
        """A layer with heads split over `size` ranks, every rank with all keys."""
        return self.local_us(heads // size, batch * context)

    def dcp_us(
        self, name: str, heads: int, batch: int, context: int, size: int, peers: str
    ) -> float:
        """A layer with keys striped over `size` ranks."""
        local = self.local_us(heads, batch * context / size)
        return local + self.exchange_us(name, heads, batch, size, peers)


def bytes_sent(heads: int, batch: int, size: int) -> float:
    """Outputs in the model dtype that a rank sends to its peers, bytes. ag_rs sends twice that,
    which is in its fitted time a byte."""
    return (size - 1) * batch * (heads / size) * WIDTH * ITEM_BYTES
