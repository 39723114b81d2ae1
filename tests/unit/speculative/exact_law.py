"""Exact law of a random program: every branch of its decisions is taken, with its probability."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Tokens = tuple[int, ...]
Law = dict[Tokens, float]

VOCAB = 3
HORIZON = 3


class BranchingChance:
    """A `Chance` that follows a path of options and then takes the first one each time."""

    def __init__(self, path: list[int]) -> None:
        self.path = path
        self.options: list[list[float]] = []
        self.weight = 1.0

    def accepts(self, position: int, probability: float) -> bool:
        return self._choose([1.0 - probability, probability]) == 1

    def draws(self, position: int, weights: Tensor) -> int:
        return self._choose((weights / weights.sum()).tolist())

    def _choose(self, probabilities: list[float]) -> int:
        index = len(self.options)
        self.options.append(probabilities)
        first = next(i for i, p in enumerate(probabilities) if p > 0)
        option = self.path[index] if index < len(self.path) else first
        self.weight *= probabilities[option]
        if index >= len(self.path):
            self.path = [*self.path, option]
        return option


def exact_law(program: Callable[[BranchingChance], Iterable[int]]) -> Law:
    """Probability of every result of the program."""
    law: Law = defaultdict(float)
    paths: list[list[int]] = [[]]
    while paths:
        given = paths.pop()
        chance = BranchingChance(given)
        law[tuple(program(chance))] += chance.weight
        for index in range(len(given), len(chance.options)):
            taken = chance.path[index]
            paths.extend(
                [*chance.path[:index], other]
                for other, p in enumerate(chance.options[index])
                if other > taken and p > 0
            )
    return dict(law)


class TokenTable:
    """A language model of 3 tokens: a random law after each prefix."""

    def __init__(self, seed: int, sharpness: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._rows = {
            prefix: (
                sharpness * torch.randn(VOCAB, generator=generator, dtype=torch.float64)
            ).softmax(0)
            for length in range(2 * HORIZON)
            for prefix in itertools.product(range(VOCAB), repeat=length)
        }

    def row(self, prefix: Tokens) -> Tensor:
        """Law of the token after the prefix: float64 [3]."""
        return self._rows[prefix]

    def rows(self, prefix: Tokens, drafts: Tokens) -> Tensor:
        """[len(drafts) + 1, 3]."""
        return torch.stack([self.row(prefix + drafts[:n]) for n in range(len(drafts) + 1)])


def law_of_first_tokens(
    window: Callable[[Tokens, BranchingChance], Iterable[int]],
) -> Law:
    """Law of the first three tokens of windows that follow each other with fresh noise."""
    windows: dict[Tokens, Law] = {}

    def after(prefix: Tokens) -> Law:
        if len(prefix) >= HORIZON:
            return {prefix[:HORIZON]: 1.0}
        if prefix not in windows:
            windows[prefix] = exact_law(lambda chance: window(prefix, chance))
        law: Law = defaultdict(float)
        for emitted, p in windows[prefix].items():
            for tokens, q in after(prefix + emitted).items():
                law[tokens] += p * q
        return law

    return after(())


def target_law(target: TokenTable) -> Law:
    """Law of the first three tokens of plain decoding."""
    return {
        tokens: float(
            torch.stack([target.row(tokens[:n])[tokens[n]] for n in range(HORIZON)]).prod()
        )
        for tokens in itertools.product(range(VOCAB), repeat=HORIZON)
    }


def largest_difference(law: Law, other: Law) -> float:
    """Of the probability of any result."""
    return max(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in {*law, *other})
