"""The key of a sequence's sampling noise. Knows no torch: coordinator and workers both use it."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """A bijection of 64-bit integers whose output bits all depend on all input bits (splitmix64).

    `value` is taken modulo 2**64.
    """
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sampling_key(seed: int, index: int) -> int:
    """The 64-bit key of completion `index` of a request with `seed`.

    mix64(mix64(seed + g) + (index + 1) * g) with g = 0x9E3779B97F4A7C15, all modulo 2**64. The key
    never changes over retries, preemption or migration, so neither do the tokens.
    Raises ValueError unless 0 <= seed < 2**64 and index >= 0.
    """
    if not 0 <= seed <= _MASK:
        raise ValueError(f"seed {seed} is outside [0, 2**64)")
    if index < 0:
        raise ValueError(f"completion index {index} must be >= 0")
    return mix64(mix64(seed + _GOLDEN) + (index + 1) * _GOLDEN)
