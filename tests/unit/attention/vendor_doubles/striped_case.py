"""A decode or verify step over c stripes, and its float64 answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention import reference
from attention.backends.base import AttentionBackend
from attention.interface import AttentionResult, DecodeBatch, GQACache, MLACache
from attention.layout import StripeLayout
from attention.rows import decode_rows

RANK, ROPE = 512, 64
CPU = torch.device("cpu")
# Relative L2 error of a row, absolute error of its lse.
OUT_LIMIT, LSE_LIMIT = 5e-3, 2e-3


@dataclass(frozen=True)
class Step:
    """committed: tokens before the window; None marks a padding row. kv_index: of GQA, else MLA."""

    committed: tuple[int | None, ...]
    heads: int = 16
    kv_index: tuple[int, ...] | None = None
    dcp_size: int = 2
    page_size: int = 16
    interleave: int = 1
    window: int = 1
    window_mask: str = "causal"
    dtype: torch.dtype = torch.bfloat16
    kv_scale: float | None = None
    head_dim: int = 64

    @property
    def is_mla(self) -> bool:
        return self.kv_index is None

    @property
    def extra(self) -> int:
        return self.window if self.window > 1 else 0

    @property
    def lengths(self) -> list[int]:
        """Global, with the window; 0 for padding."""
        return [0 if n is None else n + self.extra for n in self.committed]

    @property
    def scale(self) -> float:
        return (RANK + ROPE if self.is_mla else self.head_dim) ** -0.5


class Problem:
    """Dense inputs of a step. q: [B * w, H, W]; keys, values: of each sequence [L, Hk, W] in the
    dtype of the pool, the window's rows last; window rows come in the model dtype."""

    def __init__(self, step: Step, stripe_rows) -> None:
        generator = torch.Generator().manual_seed(17)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.step = step
        width = RANK + ROPE if step.is_mla else step.head_dim
        num_kv_heads = 1 if step.is_mla else step.kv_index[-1] + 1
        tokens = len(step.committed) * step.window
        self.q = (2 * normal(tokens, step.heads, width)).to(step.dtype)
        plain = [2 * normal(length, num_kv_heads, width) for length in step.lengths]
        self.keys = [self._stored(rows) for rows in plain]
        self.values = self.keys
        if not step.is_mla:
            shape = (num_kv_heads, width)
            self.values = [self._stored(normal(length, *shape)) for length in step.lengths]
        self.pools, self.page_table = stripe_rows(
            [self.keys] if step.is_mla else [self.keys, self.values],
            dcp_size=step.dcp_size,
            page_size=step.page_size,
            interleave=step.interleave,
            num_committed=[0 if n is None else n for n in step.committed],
        )

    def _stored(self, rows: Tensor) -> Tensor:
        if self.step.kv_scale is None:
            return rows.to(self.step.dtype)
        return (rows / self.step.kv_scale).to(torch.float8_e4m3fn)

    def true(self, rows: Tensor) -> Tensor:
        """Dequantised, float64."""
        return rows.double() * (self.step.kv_scale or 1.0)

    def cache(self, rank: int) -> GQACache | MLACache:
        number = self.step.kv_scale
        scale = None if number is None else torch.tensor([number])
        if self.step.is_mla:
            return MLACache(self.pools[rank][0][:, :, 0], scale, number)
        numbers = None if number is None else (number, number)
        return GQACache(*self.pools[rank], scale, scale, numbers)

    def window_rows(self, sequences: Sequence[Tensor]) -> Tensor | None:
        """[B * w, Hk, W] in the model dtype; NaN for padding sequences."""
        size = self.step.extra
        if not size:
            return None
        width = sequences[0].shape[1:]
        parts = [
            self.true(rows[-size:]) if len(rows) else torch.full((size, *width), float("nan"))
            for rows in sequences
        ]
        return torch.cat(parts).to(self.step.dtype)

    def expected(self, b: int, *, q: Tensor | None = None) -> AttentionResult:
        """float64 of sequence b over its whole, unstriped length."""
        step = self.step
        queries = (self.q if q is None else q)[b * step.window : (b + 1) * step.window]
        length = step.lengths[b]
        visible = reference.window_visibility(step.window, length, step.window_mask)
        key, value = self.true(self.keys[b]), self.true(self.values[b])
        if step.is_mla:
            value = key[..., :RANK]
        return reference.attend(
            queries,
            key,
            value,
            scale=step.scale,
            kv_index=step.kv_index or (0,) * step.heads,
            visible=visible,
        )


def attend_on_rank(
    problem: Problem, backend: AttentionBackend, rank: int, layers: int = 1
) -> AttentionResult:
    """What the backend says on one rank, after so many layers of the same plan."""
    step = problem.step
    batch = DecodeBatch(
        torch.tensor(step.lengths, dtype=torch.int32),
        problem.page_table,
        step.window,
        step.window_mask,
    )
    stripe = StripeLayout(step.dcp_size, rank, step.page_size, step.interleave)
    kernel = backend.plan_decode(
        decode_rows(batch, stripe),
        kv_index=step.kv_index or (0,) * step.heads,
        scale=step.scale,
        value_width=RANK if step.is_mla else step.head_dim,
        device=CPU,
    )
    cache = problem.cache(rank)
    key = problem.window_rows(problem.keys)
    for _ in range(layers):
        if isinstance(cache, MLACache):
            result = kernel.mla(problem.q, cache, None if key is None else key[:, 0])
        else:
            result = kernel.gqa(problem.q, cache, key, problem.window_rows(problem.values))
    return result


def assert_step_is_exact(
    problem: Problem,
    backend: AttentionBackend,
    *,
    q: Tensor | None = None,
    out_limit: float = OUT_LIMIT,
) -> None:
    """The merge over all ranks equals the unstriped float64 attention; empty parts are (0, -inf).

    q: what the kernel really multiplies, where it quantises the query.
    """
    step = problem.step
    parts = [attend_on_rank(problem, backend, rank) for rank in range(step.dcp_size)]
    assert all(part.out.dtype == step.dtype for part in parts)
    assert all(part.lse.dtype == torch.float32 for part in parts)
    for b, committed in enumerate(step.committed):
        rows = slice(b * step.window, (b + 1) * step.window)
        mine = [AttentionResult(part.out[rows], part.lse[rows]) for part in parts]
        for rank, part in enumerate(mine):
            has_window = bool(step.extra) and rank == 0
            stripe = StripeLayout(step.dcp_size, rank, step.page_size, step.interleave)
            if committed is None or (not stripe.local_length(committed) and not has_window):
                assert bool((part.out == 0).all()), f"sequence {b}, rank {rank}"
                assert bool((part.lse == float("-inf")).all()), f"sequence {b}, rank {rank}"
        if not step.lengths[b]:
            continue
        out, lse = reference.merge(mine)
        expected = problem.expected(b, q=q)
        errors = (out - expected.out).norm(dim=-1) / expected.out.norm(dim=-1)
        assert float(errors.max()) <= out_limit, f"sequence {b}: {float(errors.max())}"
        worst = float((lse - expected.lse).abs().max())
        assert worst <= LSE_LIMIT * max(1.0, out_limit / OUT_LIMIT), f"sequence {b}: {worst}"


def lengths_around(dcp_size: int, page_size: int) -> tuple[int | None, ...]:
    """Empty, shorter than c, around c and around a logical page, and padding."""
    c, pages = dcp_size, dcp_size * min(page_size, 16)
    return (0, 1, c - 1, None, c + 1, pages - 1, pages, pages + 1, 3 * pages + 5)


__all__ = [
    "Problem",
    "Step",
    "assert_step_is_exact",
    "attend_on_rank",
    "lengths_around",
    "replace",
]
