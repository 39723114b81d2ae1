"""What the doubles of vendors' kernels share: refusing wrong calls, and the right answer.

A double has the vendor's signature, so a wrong parameter name is a TypeError by itself. What the
vendor documents or checks beyond that is `require`d. The answer is float64 attention over exactly
the rows that the call names, so that a call that names a row it must not read shows as NaN.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor

BASE_E = 1.0
BASE_2 = 1.0 / math.log(2.0)


class WrongCall(AssertionError):
    """The kernel does not take this call."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise WrongCall(message)


@dataclass
class Record:
    """One call: the function's name and the arguments that tests look at."""

    function: str
    arguments: dict[str, object] = field(default_factory=dict)


def install(monkeypatch: pytest.MonkeyPatch, name: str, members: Mapping[str, object]) -> None:
    """Make `name` importable as a module with these members, and its parents as packages."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        dotted = ".".join(parts[:depth])
        if dotted not in sys.modules or not hasattr(sys.modules[dotted], "__double__"):
            module = ModuleType(dotted)
            module.__spec__ = ModuleSpec(dotted, None, is_package=True)
            module.__path__ = []
            module.__double__ = True
            monkeypatch.setitem(sys.modules, dotted, module)
            if depth > 1:
                parent = sys.modules[".".join(parts[: depth - 1])]
                monkeypatch.setattr(parent, parts[depth - 1], module, raising=False)
    for member, value in members.items():
        monkeypatch.setattr(sys.modules[name], member, value, raising=False)


def paged_rows(pool: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` rows of a sequence: pool [pages, page_size, ...] -> [length, ...]."""
    page_size = pool.shape[1]
    require(len(pages) * page_size >= length, f"{len(pages)} pages do not hold {length} tokens")
    used = pages[: -(-length // page_size)].long()
    require(bool(((used >= 0) & (used < len(pool))).all()), f"pages {used.tolist()} out of range")
    return pool[used].flatten(0, 1)[:length]


def attend_rows(
    q: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """q [w, H, D], key [L, Hk, D], value [L, Hk, Dv] -> float64 out [w, H, Dv], natural lse [w, H].

    H must be a multiple of Hk. causal: query t sees the first L - w + 1 + t keys, by local index.
    """
    window, num_heads, _ = q.shape
    num_keys, num_kv_heads, _ = key.shape
    require(num_heads % num_kv_heads == 0, f"{num_heads} heads over {num_kv_heads} KV heads")
    group = num_heads // num_kv_heads
    keys = key.double().repeat_interleave(group, dim=1)
    values = value.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("whd,lhd->whl", q.double(), keys) * scale
    if causal:
        seen = num_keys - window + 1 + torch.arange(window)
        hidden = torch.arange(num_keys)[None, :] >= seen[:, None]
        scores = scores.masked_fill(hidden[:, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    return torch.einsum("whl,lhd->whd", torch.softmax(scores, dim=-1), values), lse


def require_int32(tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    require(tensor.dtype == torch.int32, f"{name} is {tensor.dtype}, not int32")
    require(tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}, not {shape}")
    require(tensor.is_contiguous(), f"{name} is not contiguous")


def require_last_dim_dense(tensor: Tensor, name: str) -> None:
    require(tensor.stride(-1) == 1, f"the last dimension of {name} has stride {tensor.stride(-1)}")
