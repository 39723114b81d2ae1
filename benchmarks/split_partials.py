"""Random split partials of all ranks of a group, for what measures and tests exchanges on GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.interface import AttentionResult, SplitResult

NO_KEYS = float("-inf")


@dataclass(frozen=True)
class PartialsShape:
    """Of every rank's splits. counts: slots of each sequence; 0: its result is whole."""

    counts: tuple[int, ...]
    window: int
    num_heads: int
    width: int
    dtype: torch.dtype
    max_slots: int
    """At least max(counts); all ranks' launches are made for it."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.counts) * self.window


@dataclass(frozen=True)
class Partials:
    """splits: of each rank; expected: float64 [T, H, Dv], all of them merged."""

    splits: list[SplitResult]
    expected: Tensor


def random_partials(
    shape: PartialsShape, size: int, generator: torch.Generator, empty_share: float = 0.2
) -> Partials:
    """Splits of `size` ranks on the generator's device, the same ones for an equal seed.

    A share of the whole rows has no keys. out and lse of sequences with slots are NaN.
    """
    device = generator.device
    batch, rows = len(shape.counts), shape.window * shape.num_heads
    most = max(1, shape.max_slots)
    values = torch.randn(size, batch, most, rows, shape.width, device=device, generator=generator)
    lses = 3 * torch.randn(size, batch, most, rows, device=device, generator=generator)
    counts = torch.tensor(shape.counts)
    is_slot = torch.arange(most)[None] < counts[:, None]
    is_whole = (counts == 0).to(device)
    whole = values[:, :, 0].to(shape.dtype, copy=True)
    empty = torch.rand(lses[:, :, 0].shape, device=device, generator=generator) < empty_share
    whole_lse = lses[:, :, 0].masked_fill(empty, NO_KEYS)
    whole.masked_fill_((empty | ~is_whole[:, None])[..., None], float("nan"))
    flat = is_slot.flatten().nonzero().flatten().to(device)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32)
    splits = [
        SplitResult(
            whole[rank].view(shape.num_tokens, shape.num_heads, shape.width),
            whole_lse[rank]
            .masked_fill(~is_whole[:, None], float("nan"))
            .view(shape.num_tokens, shape.num_heads),
            values[rank].flatten(0, 1)[flat],
            lses[rank].flatten(0, 1)[flat],
            starts.to(device),
            shape.max_slots,
        )
        for rank in range(size)
    ]
    used = is_slot.to(device)[None, :, :, None]
    lses = torch.where(used, lses, NO_KEYS)
    lses[:, :, 0] = torch.where(is_whole[:, None], whole_lse, lses[:, :, 0])
    exact = values.double()
    exact[:, :, 0] = torch.where(is_whole[:, None, None], whole.double(), exact[:, :, 0])
    weights = torch.softmax(lses.double().transpose(0, 1).flatten(1, 2), dim=1).nan_to_num(0.0)
    exact = exact.transpose(0, 1).flatten(1, 2).nan_to_num(0.0)
    expected = (weights[..., None] * exact).sum(1)
    return Partials(splits, expected.view(shape.num_tokens, shape.num_heads, shape.width))


def merge_local(splits: SplitResult) -> AttentionResult:
    """A rank's splits merged by the triton backend's kernel, into out and lse in place."""
    from attention.backends.triton_merge import merge

    return merge(splits)
