"""Share work among ranks that could each do it, so that the busiest has as little as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MAX_PASSES = 50


@dataclass(frozen=True, slots=True)
class WorkItem:
    """`num_units` indivisible units of `unit_cost` each, for any of `candidates` (rank ids)."""

    num_units: int
    unit_cost: int
    candidates: tuple[int, ...]


def balance(items: Sequence[WorkItem], num_ranks: int) -> list[NDArray[np.int64]]:
    """Units of each item that each of its candidates takes, in the order of `candidates`.

    First the real-valued optimum (repeated water-filling, which minimises the sum of squared
    loads), then whole units, rounding errors carried from item to item.
    """
    ideal = _ideal_shares(items, num_ranks)
    debt = np.zeros(num_ranks)
    counts: list[NDArray[np.int64]] = []
    for item, share in zip(items, ideal, strict=True):
        ranks = np.array(item.candidates)
        units = share / item.unit_cost
        whole = np.floor(units + 1e-9).astype(np.int64)
        debt[ranks] += (units - whole) * item.unit_cost
        for _ in range(item.num_units - int(whole.sum())):
            neediest = int(np.argmax(debt[ranks]))
            whole[neediest] += 1
            debt[ranks[neediest]] -= item.unit_cost
        counts.append(whole)
    return counts


def _ideal_shares(items: Sequence[WorkItem], num_ranks: int) -> list[NDArray[np.float64]]:
    shares = [
        np.full(len(i.candidates), i.num_units * i.unit_cost / len(i.candidates)) for i in items
    ]
    loads = np.zeros(num_ranks)
    for item, share in zip(items, shares, strict=True):
        loads[list(item.candidates)] += share
    shared = [i for i, item in enumerate(items) if len(item.candidates) > 1]
    tolerance = 1e-3 * max(1.0, float(loads.max(initial=0.0))) / max(1, len(shared))
    for _ in range(_MAX_PASSES):
        change = 0.0
        for i in shared:
            ranks = list(items[i].candidates)
            others = loads[ranks] - shares[i]
            share = _water_fill(others, items[i].num_units * items[i].unit_cost)
            change = max(change, float(np.abs(share - shares[i]).max()))
            shares[i] = share
            loads[ranks] = others + share
        if change <= tolerance:
            break
    return shares


def _water_fill(levels: NDArray[np.float64], amount: float) -> NDArray[np.float64]:
    """Additions, `amount` in all, that raise the lowest of `levels` to one common level."""
    ordered = np.sort(levels)
    surface = (np.cumsum(ordered) + amount) / np.arange(1, len(ordered) + 1)
    # The surface that covers the k lowest levels is right for the last k whose level is below it.
    covered = int(np.nonzero(surface >= ordered)[0][-1])
    added: NDArray[np.float64] = np.maximum(surface[covered] - levels, 0.0)
    return added
