"""Sampling noise as a pure function of (key, position, token id): Gumbel(0, 1), never stored.

Integer part, exact on every device, all arithmetic modulo 2**32 (2**64 for the row):
    row    z = mix64(key ^ mix64((position + 1) * g)), a = low and b = high half of z
    token  t = mix32(token_id * 0x9E3779B9)                      (mix32: murmur3's finaliser)
    h      = t ^ a;  h *= 0x7FEB352D;  h ^= h >> 15;  h += b;  h *= 0x846CA68B;  h ^= h >> 13;
             h *= 0xC2B2AE35;  h ^= h >> 16                      (logical shifts)
Float part, float32, in this order:
    u = min((float(h >> 1) + 0.5) * 2**-31, 1 - 2**-24),  noise = -log(-log1p(-u))
so the noise lies in [-2.82, 22.2] for every h. g = 0x9E3779B97F4A7C15, mix64 as in
`kvbraid.sampling_key`. Draft models that couple with the target use the same function.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

_GOLDEN64 = 0x9E3779B97F4A7C15 - (1 << 64)
_MAX_UNIFORM = 1.0 - 2.0**-24


class RowWords(NamedTuple):
    """What a row adds to the hash. a, b: int32 [n], any bit pattern."""

    a: Tensor
    b: Tensor


def row_words(key: Tensor, position: Tensor) -> RowWords:
    """key: int64 [n], the 64-bit key's bit pattern; position: int64 [n], of the drawn token."""
    mixed = _mix64(key ^ _mix64((position + 1) * _GOLDEN64))
    return RowWords(_low_word(mixed), _low_word(mixed >> 32))


@lru_cache(maxsize=8)
def token_words(start: int, stop: int, device: torch.device) -> Tensor:
    """Hashes of the token ids [start, stop), int32. Shared: read only."""
    h = _low_word(torch.arange(start, stop, device=device) * 0x9E3779B9)
    h ^= _shift(h, 16)
    h *= _signed(0x85EBCA6B)
    h ^= _shift(h, 13)
    h *= _signed(0xC2B2AE35)
    h ^= _shift(h, 16)
    return h


def hash_words(tokens: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """h for token hashes and row words that broadcast to one shape; a fresh int32 tensor."""
    h = tokens ^ a
    scratch = torch.empty_like(h)
    h *= _signed(0x7FEB352D)
    _xor_shift(h, 15, scratch)
    h += b
    h *= _signed(0x846CA68B)
    _xor_shift(h, 13, scratch)
    h *= _signed(0xC2B2AE35)
    _xor_shift(h, 16, scratch)
    return h


def negative_gumbel(h: Tensor) -> Tensor:
    """Minus the noise of the hashes `h` (int32, overwritten): float32, finite for every h."""
    uniform = h.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF).to(torch.float32)
    uniform.add_(0.5).mul_(-(2.0**-31)).clamp_(min=-_MAX_UNIFORM)
    return uniform.log1p_().neg_().log_()


def _xor_shift(h: Tensor, bits: int, scratch: Tensor) -> None:
    torch.bitwise_right_shift(h, bits, out=scratch)
    h ^= scratch.bitwise_and_((1 << (32 - bits)) - 1)


def _shift(h: Tensor, bits: int) -> Tensor:
    return (h >> bits) & ((1 << (32 - bits)) - 1)


def _mix64(z: Tensor) -> Tensor:
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * (0xBF58476D1CE4E5B9 - (1 << 64))
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * (0x94D049BB133111EB - (1 << 64))
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _low_word(z: Tensor) -> Tensor:
    """The low 32 bits of int64 values as int32, without relying on how a cast overflows."""
    return (((z + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)).to(torch.int32)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
