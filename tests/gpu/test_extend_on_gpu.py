"""Extend of the triton backend on a GPU against float64 attention over [prefix | chunk].

The grid covers every pair of the factors below; SEED makes it the same grid each time. Rows before,
behind and beside each tensor's rows in memory are NaN, and so is the prefix of a sequence without a
chunk.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from attention.backends.base import ExtendKernel
from attention.backends.torch_backend import TorchBackend
from attention.backends.triton_backend import TritonBackend
from attention.backends.triton_extend import TritonExtendKernel
from attention.interface import LatentExpansion
from attention.rows import ExtendRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]

SEED = 20261129
DEVICE = torch.device("cuda")

# name -> (rank, 0 for GQA; key width, nope part in MLA; rope; value width; heads a KV head, 0: all)
KINDS = {
    "gqa64": (0, 64, 0, 64, 2.7),
    "gqa128": (0, 128, 0, 128, 4),
    "mqa96": (0, 96, 0, 96, 0),
    "gqa256": (0, 256, 0, 256, 8),
    "mla192": (512, 128, 64, 128, 1),
    "mla24": (64, 16, 8, 16, 1),
}
# name -> prefix and chunk lengths
BATCHES = {
    "tiny": ([0, 1, 0, 129, 70], [1, 17, 0, 64, 0]),
    "ragged": ([0, 4097, 513, 0], [512, 300, 1, 129]),
    "mixed": ([5000, 64, 1023, 1, 0, 0], [1, 1, 3, 1, 1, 2000]),
    "long": ([32768], [64]),
    "extend": ([8192, 0], [1024, 700]),
    "chunk": ([0], [4096]),
}
FACTORS = {
    "kind": tuple(KINDS),
    "heads": (1, 5, 9, 16, 64),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "batch": tuple(BATCHES),
    "needle": (0, 0.3, 0.999, None),
}
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}


@dataclass(frozen=True)
class Case:
    """needle: where in a sequence its last query has one strong key, as a share of its length."""

    kind: str
    heads: int
    dtype: torch.dtype
    batch: str
    needle: float | None

    @property
    def kv_index(self) -> tuple[int, ...]:
        group = KINDS[self.kind][4]
        num_kv_heads = max(1, int(self.heads / group)) if group else 1
        return tuple(h * num_kv_heads // self.heads for h in range(self.heads))

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind}-h{self.heads}-{dtype}-{self.batch}-n{self.needle}"


def pairwise_grid() -> list[Case]:
    """Cases that together hold every pair of values of two factors, picked greedily."""
    names = list(FACTORS)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
    }
    generator = random.Random(SEED)
    cases = []
    while missing:
        candidates = [{name: generator.choice(FACTORS[name]) for name in names} for _ in range(60)]
        covered = [
            missing & set(itertools.combinations(candidate.items(), 2)) for candidate in candidates
        ]
        best = max(range(len(candidates)), key=lambda i: len(covered[i]))
        missing -= covered[best]
        if covered[best]:
            cases.append(Case(**candidates[best]))
    return cases


def fenced(rows: Tensor) -> Tensor:
    """The same rows with NaN before, behind and beside them in memory."""
    size = (rows.shape[0] + 300, *rows.shape[1:-1], rows.shape[-1] + 16)
    memory = torch.full(size, float("nan"), dtype=rows.dtype, device=DEVICE)
    view = memory[150 : 150 + rows.shape[0], ..., : rows.shape[-1]]
    return view.copy_(rows)


class Problem:
    """Inputs of one case: all of a sequence's rows, prefix first."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rank, key_width, rope, value_width, _ = KINDS[case.kind]
        self.prefix_lens, self.chunk_lens = BATCHES[case.batch]
        width = key_width + rope
        self.scale = width**-0.5
        self.generator = torch.Generator(DEVICE).manual_seed(SEED)
        # Up-projected keys are rounded to the dtype: scores are then as inexact as they are large.
        size = 1.0 if self.rank else 2.0
        self.q = self.normal(sum(self.chunk_lens), case.heads, width, size=size)
        row_shape = (self.rank + rope,) if self.rank else (max(case.kv_index) + 1, width)
        if self.rank:
            # Up-projected keys and values are then of the size of others.
            self.expansion = LatentExpansion(
                self.normal(case.heads, key_width, self.rank, size=self.rank**-0.5),
                self.normal(case.heads, self.rank, value_width, size=self.rank**-0.5),
            )
        self.keys, self.values = [], []
        last = -1
        for prefix, chunk in zip(self.prefix_lens, self.chunk_lens, strict=True):
            last += chunk
            key = self.normal(prefix + chunk, *row_shape)
            if chunk and not self.rank and case.needle is not None:
                target = self.q[last, 0].float()
                needle = 25 / self.scale * target / target.square().sum()
                key[int(case.needle * len(key)), 0] = needle.to(key.dtype)
            value = self.normal(prefix + chunk, *row_shape)
            if not chunk:
                key.fill_(float("nan"))
                value.fill_(float("nan"))
            self.keys.append(key)
            self.values.append(value)

    def normal(self, *shape: int, size: float = 1.0) -> Tensor:
        values = torch.randn(*shape, device=DEVICE, generator=self.generator)
        return (size * values).to(self.case.dtype)

    @property
    def rows(self) -> ExtendRows:
        return ExtendRows(tuple(self.prefix_lens), tuple(self.chunk_lens))

    @property
    def tokens(self) -> list[slice]:
        return [slice(a, b) for a, b in pairwise(accumulate(self.chunk_lens, initial=0))]

    def kernel(self, backend: TritonBackend | TorchBackend) -> ExtendKernel:
        return backend.plan_extend(
            self.rows, kv_index=self.case.kv_index, scale=self.scale, device=DEVICE
        )

    def run(self, kernel: ExtendKernel) -> Tensor:
        prefix, chunk = self._parts(self.keys)
        if self.rank:
            return kernel.mla(self.q, chunk, prefix, self.expansion)
        prefix_value, chunk_value = self._parts(self.values)
        return kernel.gqa(self.q, chunk, chunk_value, prefix, prefix_value)

    def _parts(self, rows: list[Tensor]) -> tuple[Tensor | None, Tensor]:
        pairs = [x.tensor_split([p]) for x, p in zip(rows, self.prefix_lens, strict=True)]
        prefix = fenced(torch.cat([prefix for prefix, _ in pairs]))
        return prefix if len(prefix) else None, fenced(torch.cat([chunk for _, chunk in pairs]))

    def head_keys(self, sequence: int, head: int) -> tuple[Tensor, Tensor]:
        """float64 keys and values [n, ...] that a head of a sequence sees: those of MLA expanded in
        this dtype, as multi-head attention has to keep them."""
        key = self.keys[sequence]
        if not self.rank:
            kv_head = self.case.kv_index[head]
            return key[:, kv_head].double(), self.values[sequence][:, kv_head].double()
        compressed, rope_key = key[:, : self.rank], key[:, self.rank :]
        nope = compressed @ self.expansion.w_kc[head].T
        value = compressed @ self.expansion.w_vc[head]
        return torch.cat([nope, rope_key], -1).double(), value.double()

    def oracle(self, sequence: int, head: int) -> tuple[Tensor, Tensor]:
        """float64 results [chunk, Dv], and for each the root of the sum of its weighted values'
        squares [chunk]: the norm that it would have if they did not cancel."""
        key, value = self.head_keys(sequence, head)
        q = self.q[self.tokens[sequence], head].double()
        hidden = (
            torch.arange(len(key), device=DEVICE)
            > torch.arange(len(key) - len(q), len(key), device=DEVICE)[:, None]
        )
        scores = (q @ key.T * self.scale).masked_fill_(hidden, float("-inf"))
        weights = torch.softmax(scores, -1)
        return weights @ value, (weights.square() @ value.square().sum(-1)).sqrt()


def largest_error(problem: Problem, out: Tensor) -> float:
    """L2 error of a (token, head) row, relative to it or, where its values nearly cancel, to the
    norm that they would have had if they did not: weights are rounded before they can cancel.
    Infinite where anything is not a number."""
    worst = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for sequence, span in enumerate(problem.tokens):
        for head in range(problem.case.heads if span.stop > span.start else 0):
            want, uncancelled = problem.oracle(sequence, head)
            error = (out[span, head].double() - want).norm(dim=-1)
            error /= want.norm(dim=-1).maximum(uncancelled)
            worst = torch.maximum(worst, error.nan_to_num(float("inf")).max())
    return float(worst)


@pytest.mark.parametrize("case", pairwise_grid(), ids=str)
def test_grid_against_float64(case: Case) -> None:
    problem = Problem(case)
    out = problem.run(problem.kernel(TritonBackend()))
    error = largest_error(problem, out)
    assert error <= LIMITS[case.dtype]


PLAIN = Case("gqa128", 16, torch.bfloat16, "ragged", 0.3)


@pytest.mark.parametrize("kind", ["gqa128", "mla192"])
def test_a_damaged_key_is_seen_by_its_own_sequence_only(kind: str) -> None:
    problem = Problem(replace(PLAIN, kind=kind))
    undamaged = problem.run(problem.kernel(TritonBackend()))
    problem.keys[1][4000] = float("nan")
    out = problem.run(problem.kernel(TritonBackend()))
    hurt = problem.tokens[1]
    assert bool(out[hurt].isnan().all())
    assert torch.equal(out[: hurt.start], undamaged[: hurt.start])
    assert torch.equal(out[hurt.stop :], undamaged[hurt.stop :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_deterministic_results_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    alone, together = (
        Problem(replace(PLAIN, dtype=dtype, batch=batch)) for batch in ("long", "ragged")
    )
    together.prefix_lens, together.chunk_lens = [32768, 4097, 0], [64, 300, 1]
    together.q[:64] = alone.q
    for rows in (together.keys, together.values):
        rows[:] = [together.normal(n, *rows[0].shape[1:]) for n in (32768 + 64, 4097 + 300, 1)]
    together.q = together.q[:365]
    together.keys[0], together.values[0] = alone.keys[0], alone.values[0]
    one, many = (
        problem.run(problem.kernel(TritonBackend(deterministic=True)))
        for problem in (alone, together)
    )
    assert torch.equal(one, many[:64])


@pytest.mark.parametrize("batch", ["extend", "long"])
def test_mla_in_several_launches(batch: str) -> None:
    """Prefixes expanded 1000 rows at a time, with and without cuts between programs."""
    problem = Problem(replace(PLAIN, kind="mla192", batch=batch))
    row = 16 * (128 + 128)
    kernel = TritonExtendKernel(
        problem.rows,
        kv_index=problem.case.kv_index,
        scale=problem.scale,
        deterministic=False,
        device=DEVICE,
        max_expanded=1000 * row,
    )
    assert largest_error(problem, problem.run(kernel)) <= LIMITS[torch.bfloat16]


def test_a_long_mla_prefix_is_never_expanded_as_a_whole() -> None:
    problem = Problem(replace(PLAIN, kind="mla192", batch="long"))
    problem.prefix_lens, problem.chunk_lens = [128 << 10], [64]
    problem.keys = [problem.normal((128 << 10) + 64, 512 + 64)]
    kernel = problem.kernel(TritonBackend())
    prefix, chunk = problem._parts(problem.keys)
    kernel.mla(problem.q, chunk, prefix, problem.expansion)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernel.mla(problem.q, chunk, prefix, problem.expansion)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 400 << 20, f"{peak / 2**20:.0f} MiB"


@pytest.mark.parametrize("kind", ["gqa64", "mla24"])
def test_it_agrees_with_the_torch_backend(kind: str) -> None:
    problem = Problem(replace(PLAIN, kind=kind, dtype=torch.float32))
    ours, stock = (
        problem.run(problem.kernel(backend)) for backend in (TritonBackend(), TorchBackend())
    )
    torch.testing.assert_close(ours, stock, rtol=1e-3, atol=1e-4)


def test_graph_replay_equals_eager() -> None:
    problem = Problem(PLAIN)
    kernel = problem.kernel(TritonBackend())
    parts = [*problem._parts(problem.keys), *problem._parts(problem.values)]
    prefix_key, key, prefix_value, value = parts

    def call() -> Tensor:
        return kernel.gqa(problem.q, key, value, prefix_key, prefix_value)

    eager = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)
