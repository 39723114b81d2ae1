"""The rows that one step hands to the sampler, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

KEEP_ALL = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Sampled rows that take the same path, m of them, in row order.

    rows: int64 [m], indices into the step's rows. key: int64 [m], bit pattern of the 64-bit key.
    position: int64 [m], absolute position of the token being drawn. temperature: float32 [m] > 0.
    top_k: int64 [m], KEEP_ALL for all. top_p, min_p: float32 [m]. has_*: whether any row needs it.
    """

    rows: Tensor
    key: Tensor
    position: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    has_top_k: bool
    has_top_p: bool


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Sparse changes of this rank's logits. *_index: int64, row * V_local + column, distinct.

    bias [a] is added. Then x becomes (x / repetition if x > 0 else x * repetition) - subtract,
    both float32 [b]. Then banned logits are -inf.
    """

    bias_index: Tensor
    bias: Tensor
    penalty_index: Tensor
    repetition: Tensor
    subtract: Tensor
    banned_index: Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """N rows of one step. Every row is in exactly one of `greedy` (int64 indices, on the CPU if all
    rows are), `plain` (sampled from the whole vocabulary) and `filtered` (top-k, top-p or min-p
    first).

    edits: None when no row changes its logits on any rank. top_logprobs: one entry a row, None for
    rows that want no log-probabilities.
    """

    num_rows: int
    greedy: Tensor | None
    plain: RowGroup | None
    filtered: RowGroup | None
    edits: LogitEdits | None
    top_logprobs: tuple[int | None, ...]
