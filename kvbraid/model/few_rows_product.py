"""Products with few rows on CPU: a batch of decoding sequences, or a verify window.

MKL's plain sgemm is slow with 4 to 8 rows: it neither streams the matrix as for one row nor blocks
it as for many. A matrix that is packed beforehand is read faster (benchmarks/cpu_decode.py, 8
streams).
"""

from __future__ import annotations

import torch
from torch import Tensor

# MKL packs for a number of rows; smaller batches are padded to it.
_NUM_ROWS = 8
_FEWEST_ROWS = 4
# Below this a product's overhead counts for more than the reading of the matrix.
_MIN_ELEMENTS = 1 << 17


class FewRowsProduct:
    """x @ weight for 4 to 8 rows of float32, with a packed copy of the matrix.

    The copy is made at the first such product: a worker that never has a batch, such as one that
    computes prompts, keeps a single copy.
    """

    __slots__ = ("_given", "_packed")

    def __init__(self, weight: Tensor) -> None:
        """weight: [in, out], in memory as [out, in] or [in, out]; not copied yet."""
        self._given = weight
        self._packed: Tensor | None = None

    @staticmethod
    def takes(num_rows: int) -> bool:
        """Whether `forward` is for this many rows."""
        return _FEWEST_ROWS <= num_rows <= _NUM_ROWS

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], T as `takes`."""
        weight = self._given.t()
        if self._packed is None:
            self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _NUM_ROWS)
        num_rows = x.shape[0]
        if num_rows < _NUM_ROWS:
            x = torch.nn.functional.pad(x, (0, 0, 0, _NUM_ROWS - num_rows))
        out: Tensor = torch.ops.mkl._mkl_linear(x, self._packed, weight, None, _NUM_ROWS)
        return out[:num_rows]


def few_rows_product(weight: Tensor) -> FewRowsProduct | None:
    """The product with `weight` [in, out], where a packed copy gains anything; None elsewhere."""
    gains = (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= _MIN_ELEMENTS
        and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    )
    return FewRowsProduct(weight) if gains else None
