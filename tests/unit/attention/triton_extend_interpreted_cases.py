"""Runs the triton backend's extend kernel in Triton's interpreter and prints what it got, as JSON.

A program of its own because TRITON_INTERPRET must be set before triton is imported.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from attention.backends.base import ExtendKernel
from attention.backends.torch_backend import TorchBackend
from attention.backends.triton_backend import TritonBackend
from attention.backends.triton_extend import MAX_EXPANDED, TritonExtendKernel
from attention.interface import LatentExpansion
from attention.reference import attend, mla_expanded, window_visibility
from attention.rows import ExtendRows

DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    name: str
    kv_index: tuple[int, ...]
    key_width: int  # of the nope part in MLA
    prefix_lens: tuple[int, ...]
    chunk_lens: tuple[int, ...]
    rank: int = 0  # > 0: MLA
    rope: int = 0
    value_width: int = 0  # 0: as wide as keys
    dtype: str = "float32"
    deterministic: bool = False
    max_expanded: int = MAX_EXPANDED
    needle: int = 0  # position of a key that the last query loves; negative: from the end
    damaged: bool = False  # runs once more with a damaged key

    @property
    def width(self) -> int:
        return self.value_width or self.key_width

    @property
    def scale(self) -> float:
        return (self.key_width + self.rope) ** -0.5


def heads(num_q_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    return tuple(h * num_kv_heads // num_q_heads for h in range(num_q_heads))


MLA_TINY = Case("", heads(3, 1), 16, (129, 0, 1), (17, 64, 1), rank=64, rope=8, value_width=16)
CASES = (
    Case("mha, one head", heads(1, 1), 16, (0, 1, 129), (17, 64, 1), damaged=True),
    Case("mha, a needle in the chunk", heads(3, 3), 64, (129, 0), (64, 17), needle=-3),
    Case("gqa, 9 heads over 3", heads(9, 3), 64, (1, 129), (64, 17), dtype="float16",
         damaged=True),
    Case("gqa, 5 heads over 2 of 4", (1, 1, 1, 2, 2), 64, (129, 40, 0, 1), (17, 0, 64, 1)),
    Case("gqa, a prefix only where there is no chunk", heads(4, 2), 64, (40, 0), (0, 17),
         dtype="float16"),
    Case("gqa, a KV head without heads here", (0, 2, 2), 24, (40,), (33,)),
    Case("mqa, 16 heads", heads(16, 1), 128, (129, 0), (17, 5), dtype="float16", needle=100),
    Case("gqa, a prefix cut into pieces", heads(5, 2), 64, (700, 3), (5, 1), needle=500,
         damaged=True),
    Case("mqa, cut, half precision", heads(8, 1), 128, (900,), (5,), dtype="float16"),
    Case("gqa, deterministic", heads(4, 2), 32, (700, 40), (5, 17), deterministic=True),
    replace(MLA_TINY, name="mla as in tiny-mla"),
    replace(MLA_TINY, name="mla, tiny, 3 launches", max_expanded=64 * 3 * 32, needle=70),
    replace(MLA_TINY, name="mla, cut, 3 launches", prefix_lens=(400, 9, 0), chunk_lens=(3, 2, 1),
            kv_index=heads(2, 1), max_expanded=192 * 2 * 32, damaged=True),
    Case("mla, 16 heads of 128 + 64", heads(16, 1), 128, (129, 0), (3, 5), rank=32, rope=64,
         dtype="float16"),
    Case("mla, wider values", heads(5, 1), 24, (0, 33), (1, 17), rank=32, rope=16, value_width=40),
)  # fmt: skip


def fenced(rows: Tensor) -> Tensor:
    """The same rows with NaN before, behind and beside them in memory."""
    size = (rows.shape[0] + 140, *rows.shape[1:-1], rows.shape[-1] + 8)
    memory = torch.full(size, float("nan"), dtype=rows.dtype)
    view = memory[70 : 70 + rows.shape[0], ..., : rows.shape[-1]]
    return view.copy_(rows)


class Problem:
    """Inputs of one case: all of a sequence's rows, prefix first."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        dtype = getattr(torch, case.dtype)
        num_heads = len(case.kv_index)
        width = case.key_width + case.rope
        self.lens = [p + c for p, c in zip(case.prefix_lens, case.chunk_lens, strict=True)]
        self.q = (2 * torch.randn(sum(case.chunk_lens), num_heads, width)).to(dtype)
        self.expansion = LatentExpansion(
            torch.randn(num_heads, case.key_width, max(1, case.rank)).to(dtype),
            torch.randn(num_heads, max(1, case.rank), case.width).to(dtype),
        )
        if case.rank:
            row_shape: tuple[int, ...] = (case.rank + case.rope,)
        else:
            row_shape = (max(case.kv_index) + 2, width)
        self.keys = [torch.randn(n, *row_shape) * case_size(case) for n in self.lens]
        self.values = [torch.randn(n, *row_shape) for n in self.lens]
        tokens = list(accumulate(case.chunk_lens))
        for key, chunk, last in zip(self.keys, case.chunk_lens, tokens, strict=True):
            if chunk and not case.rank and case.needle < len(key):
                target = self.q[last - 1, 0].float()
                key[case.needle, case.kv_index[0]] = 20 / case.scale * target / target.norm() ** 2
        self.keys = [key.to(dtype) for key in self.keys]
        self.values = [value.to(dtype) for value in self.values]
        for key, value, chunk in zip(self.keys, self.values, case.chunk_lens, strict=True):
            if not chunk:
                key.fill_(float("nan"))
                value.fill_(float("nan"))

    def run(self, kernel: ExtendKernel) -> Tensor:
        prefix, chunk = self._parts(self.keys)
        if self.case.rank:
            return kernel.mla(self.q, chunk, prefix, self.expansion)
        prefix_value, chunk_value = self._parts(self.values)
        return kernel.gqa(self.q, chunk, chunk_value, prefix, prefix_value)

    def _parts(self, rows: list[Tensor]) -> tuple[Tensor | None, Tensor]:
        pairs = [x.tensor_split([p]) for x, p in zip(rows, self.case.prefix_lens, strict=True)]
        prefix = fenced(torch.cat([prefix for prefix, _ in pairs]))
        return prefix if len(prefix) else None, fenced(torch.cat([chunk for _, chunk in pairs]))

    def reference(self, sequence: int, q: Tensor) -> Tensor:
        """float64 [chunk, H, Dv]."""
        case, key = self.case, self.keys[sequence]
        visible = window_visibility(len(q), len(key))
        if case.rank:
            return mla_expanded(q, key, self.expansion, scale=case.scale, visible=visible).out
        value = self.values[sequence]
        return attend(q, key, value, scale=case.scale, kv_index=case.kv_index, visible=visible).out


def case_size(case: Case) -> float:
    """Latents are small, so that up-projected keys are of the size of others."""
    return case.rank**-0.5 if case.rank else 1.0


def triton_kernel(case: Case) -> ExtendKernel:
    rows = ExtendRows(case.prefix_lens, case.chunk_lens)
    if case.max_expanded == MAX_EXPANDED:
        backend = TritonBackend(deterministic=case.deterministic)
        return backend.plan_extend(rows, kv_index=case.kv_index, scale=case.scale, device=DEVICE)
    return TritonExtendKernel(
        rows,
        kv_index=case.kv_index,
        scale=case.scale,
        deterministic=case.deterministic,
        device=DEVICE,
        max_expanded=case.max_expanded,
    )


def row_error(got: Tensor, want: Tensor) -> float:
    errors = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    return float(errors.max()) if not bool(errors.isnan().any()) else float("inf")


def run(case: Case) -> dict[str, object]:
    """Largest errors of a row, against the reference and the torch backend."""
    problem = Problem(case)
    got = problem.run(triton_kernel(case))
    torch_kernel = TorchBackend().plan_extend(
        ExtendRows(case.prefix_lens, case.chunk_lens),
        kv_index=case.kv_index,
        scale=case.scale,
        device=DEVICE,
    )
    tokens = [slice(a, b) for a, b in pairwise(accumulate(case.chunk_lens, initial=0))]
    error = max(
        row_error(got[span], problem.reference(i, problem.q[span]))
        for i, span in enumerate(tokens)
        if span.stop > span.start
    )
    return {
        "name": case.name,
        "dtype": case.dtype,
        "error": error,
        "torch_difference": row_error(got, problem.run(torch_kernel).double()),
        "damage_stays": damage_stays(case, got, tokens) if case.damaged else None,
    }


def damage_stays(case: Case, undamaged: Tensor, tokens: list[slice]) -> bool:
    """NaN in the first key and value of the last sequence is in all its rows, and in no others.

    Tiles of the sequence before it reach over them.
    """
    problem = Problem(case)
    problem.keys[-1][0] = problem.values[-1][0] = float("nan")
    got = problem.run(triton_kernel(case))
    hurt, others = got[tokens[-1]], slice(tokens[-1].start)
    return bool(hurt.isnan().all()) and torch.equal(got[others], undamaged[others])


def is_deterministic() -> bool:
    """Alone and among others."""
    alone = Case("", heads(4, 2), 32, (300,), (5,), deterministic=True)
    together = replace(alone, prefix_lens=(300, 200, 0), chunk_lens=(5, 40, 3))
    one, many = Problem(alone), Problem(together)
    many.q[:5], many.keys[0], many.values[0] = one.q, one.keys[0], one.values[0]
    return torch.equal(one.run(triton_kernel(alone)), many.run(triton_kernel(together))[:5])


def empties_are_empty() -> bool:
    """No tokens, and no heads of this rank's own."""
    none = Case("", heads(2, 1), 16, (5, 0), (0, 0))
    headless = Case("", (), 16, (5,), (3,))
    rows = torch.randn(3, 1, 16)
    outs = [
        triton_kernel(none).gqa(torch.empty(0, 2, 16), rows[:0], rows[:0], None, None),
        triton_kernel(headless).gqa(torch.empty(3, 0, 16), rows, rows, None, None),
    ]
    return [tuple(out.shape) for out in outs] == [(0, 2, 16), (3, 0, 16)]


if __name__ == "__main__":
    report = {
        "cases": [run(case) for case in CASES],
        "is_deterministic": is_deterministic(),
        "empties_are_empty": empties_are_empty(),
    }
    sys.stdout.write(json.dumps(report) + "\n")
