"""The noise is the documented function of (key, position, token), finite and Gumbel distributed."""

from __future__ import annotations

import math

import pytest
import torch

from kvbraid.sampling_key import mix64
from kvbraid.sampling_noise import hash_words, negative_gumbel, row_words, token_words

WORD = (1 << 32) - 1
GOLDEN = 0x9E3779B97F4A7C15


def documented_hash(key: int, position: int, token_id: int) -> int:
    """The module's docstring in Python integers."""
    z = mix64(key ^ mix64((position + 1) * GOLDEN))
    a, b = z & WORD, z >> 32
    t = token_id * 0x9E3779B9 & WORD
    t ^= t >> 16
    t = t * 0x85EBCA6B & WORD
    t ^= t >> 13
    t = t * 0xC2B2AE35 & WORD
    t ^= t >> 16
    h = t ^ a
    h = h * 0x7FEB352D & WORD
    h ^= h >> 15
    h = (h + b) & WORD
    h = h * 0x846CA68B & WORD
    h ^= h >> 13
    h = h * 0xC2B2AE35 & WORD
    return h ^ h >> 16


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def hashes(keys: list[int], positions: list[int], start: int, stop: int) -> torch.Tensor:
    words = row_words(torch.tensor([signed(key, 64) for key in keys]), torch.tensor(positions))
    tokens = token_words(start, stop, torch.device("cpu"))
    return hash_words(tokens, words.a[:, None], words.b[:, None])


def test_hash_is_the_documented_integer_function() -> None:
    keys = [0, 1, (1 << 64) - 1, 1 << 63, 0x0123456789ABCDEF]
    positions = [0, 1, 4095, 131_072, (1 << 31) - 1]
    start, stop = 160_000, 160_040
    got = hashes(keys, positions, start, stop)
    for row, (key, position) in enumerate(zip(keys, positions, strict=True)):
        expected = [signed(documented_hash(key, position, t), 32) for t in range(start, stop)]
        assert got[row].tolist() == expected


def test_token_hash_does_not_depend_on_where_a_shard_begins() -> None:
    whole = hashes([5], [9], 0, 1000)
    assert torch.equal(whole[:, 333:777], hashes([5], [9], 333, 777))


@pytest.mark.parametrize("word", [0, 1, 2, (1 << 31) - 1, 1 << 31, WORD - 1, WORD])
def test_noise_is_finite_at_the_edges_of_the_hash(word: int) -> None:
    noise = -negative_gumbel(torch.tensor([signed(word, 32)], dtype=torch.int32)).item()
    uniform = min(((word >> 1) + 0.5) / 2**31, 1.0 - 2.0**-24)
    assert noise == pytest.approx(-math.log(-math.log1p(-uniform)), rel=1e-5, abs=1e-5)
    assert -2.82 < noise < 22.2


def test_noise_follows_the_gumbel_law() -> None:
    noise = -negative_gumbel(hashes(list(range(64)), [7] * 64, 0, 8192)).double().flatten()
    n = noise.numel()
    # Kolmogorov-Smirnov distance to exp(-exp(-x)); 3.2 / sqrt(n) has a chance of 2.5e-9.
    cdf = torch.exp(-torch.exp(-noise.sort().values))
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = max((cdf - steps[:-1]).max().item(), (steps[1:] - cdf).max().item())
    assert distance < 3.2 / math.sqrt(n)


@pytest.mark.parametrize("neighbour", ["key", "position", "token"])
def test_noise_of_neighbours_is_uncorrelated(neighbour: str) -> None:
    rows, columns = 64, 4096
    first = hashes(list(range(rows)), [7] * rows, 0, columns)
    second = {
        "key": hashes(list(range(1, rows + 1)), [7] * rows, 0, columns),
        "position": hashes(list(range(rows)), [8] * rows, 0, columns),
        "token": hashes(list(range(rows)), [7] * rows, 1, columns + 1),
    }[neighbour]
    a = first.double().flatten() / 2**31
    b = second.double().flatten() / 2**31
    for left, right in ((a, b), (a.abs(), b.abs()), (a.abs(), b)):
        correlation = torch.corrcoef(torch.stack((left, right)))[0, 1].item()
        assert abs(correlation) < 6 / math.sqrt(rows * columns)
