"""The product of activations with one matrix of the model, in the form that runs fastest here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Smaller matrices lie in a core's cache, where oneDNN's overhead of a call counts for more than how
# the matrix is read.
_MIN_PACKED_ELEMENTS = 1 << 18
# With fewer rows oneDNN's kernel reads the matrix slower, not faster (AMD EPYC, AVX-512): it keeps
# too little of it in flight.
_FEWEST_PACKED_ROWS = 6
# The layout is chosen for this many rows (a verify window, a small batch) and serves all others.
_PACKED_FOR_ROWS = 8


class MatrixProduct(Protocol):
    """x @ weight.T (+ bias)."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], in the weight's dtype."""
        ...


class PlainProduct:
    """Implements MatrixProduct with torch's own product."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [in, out], in any memory order."""
        self._weight = weight
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """See MatrixProduct."""
        if self._bias is None:
            return torch.mm(x, self._weight)
        return torch.addmm(self._bias, x, self._weight)


class PackedProduct:
    """Implements MatrixProduct on CPU in fp32 with oneDNN, which keeps the matrix in blocks.

    MKL, which torch's own product takes, reads the matrix for 2 to 16 rows at less than half the
    speed on an AMD EPYC (benchmarks/results/cpu_products.json).
    """

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in], contiguous; a packed copy is kept."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """See MatrixProduct."""
        num_rows = x.shape[0]
        if num_rows >= _FEWEST_PACKED_ROWS:
            return self._multiply(x)
        if num_rows == 1:
            padded = x.expand(_FEWEST_PACKED_ROWS, -1)
        else:
            padded = F.pad(x, (0, 0, 0, _FEWEST_PACKED_ROWS - num_rows))
        return self._multiply(padded)[:num_rows]

    def _multiply(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return out


def matrix_product(parts: Sequence[Tensor], bias: Tensor | None = None) -> MatrixProduct:
    """The product with matrices [out_i, in] that share their input; the outputs are concatenated.

    bias: [sum of out_i].
    """
    weight = torch.cat(list(parts)) if len(parts) > 1 else parts[0].contiguous()
    if _is_packed(weight):
        return PackedProduct(weight, bias)
    return PlainProduct(weight.t(), bias)


def _is_packed(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= _MIN_PACKED_ELEMENTS
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )
