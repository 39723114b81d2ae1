"""Covering arrays: few rows in which every pair of values of any two factors occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, object]


def pairwise_rows(
    factors: Mapping[str, Sequence[object]],
    *,
    seed: int,
    is_legal: Callable[[Row], bool] = lambda row: True,
    num_candidates: int = 60,
) -> list[Row]:
    """Rows (factor -> value) that cover every pair that some legal row can have.

    Greedy: of `num_candidates` random legal rows the one that covers most missing pairs is taken,
    until nothing is missing that a thousand further tries find. The same seed gives the same rows.
    """
    rng = random.Random(seed)
    missing = {
        frozenset(((a, x), (b, y)))
        for (a, xs), (b, ys) in itertools.combinations(factors.items(), 2)
        for x in xs
        for y in ys
    }
    rows: list[Row] = []
    fruitless = 0
    while missing and fruitless < 1000:
        candidates = [_random_row(factors, rng, is_legal) for _ in range(num_candidates)]
        best = max(candidates, key=lambda row: len(_pairs(row) & missing))
        covered = _pairs(best) & missing
        fruitless = 0 if covered else fruitless + num_candidates
        if covered:
            rows.append(best)
            missing -= covered
    return rows


def _random_row(
    factors: Mapping[str, Sequence[object]], rng: random.Random, is_legal: Callable[[Row], bool]
) -> Row:
    while True:
        row = {name: rng.choice(list(values)) for name, values in factors.items()}
        if is_legal(row):
            return row


def _pairs(row: Row) -> set[frozenset[tuple[str, object]]]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
