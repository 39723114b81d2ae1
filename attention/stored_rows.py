"""Rows of a KV pool as they are stored, and their true values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.rows import rows_of


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """Rows [R, ..., width] whose true values are rows * scale.

    scale: float32 [1], or one a row and head, [R, ...]; None where the rows are the values.
    """

    rows: Tensor
    scale: Tensor | None = None

    @classmethod
    def of(cls, pages: Tensor, scale: Tensor | None) -> StoredRows:
        """The rows of a pool [N, P, ..., width] with scale [1] or [N, P, ...], without a copy.

        Raises ValueError for scales of another shape.
        """
        if scale is not None and scale.dim() > 1:
            scale = rows_of(scale)
        rows = rows_of(pages)
        if scale is not None and scale.shape != (1,) and scale.shape != rows.shape[:-1]:
            raise ValueError(
                f"scale of shape {tuple(scale.shape)} for rows of {tuple(rows.shape)}; expected "
                f"(1,) or {tuple(rows.shape[:-1])}"
            )
        return cls(rows, scale)

    def with_one_head(self) -> StoredRows:
        """Rows [R, width] as [R, 1, width]."""
        scale = self.scale
        if scale is not None and self._has_row_scales:
            scale = scale[:, None]
        return StoredRows(self.rows[:, None], scale)

    def narrow(self, start: int, length: int) -> StoredRows:
        """A run of rows, without a copy."""
        scale = self.scale
        if scale is not None and self._has_row_scales:
            scale = scale.narrow(0, start, length)
        return StoredRows(self.rows.narrow(0, start, length), scale)

    def select(self, ids: Tensor, out: Tensor | None = None) -> StoredRows:
        """The rows with these int64 indices [n], written into `out` [n, ..., width] if given."""
        scale = self.scale
        if scale is not None and self._has_row_scales:
            scale = scale.index_select(0, ids)
        # 8-bit floats have no index operations: they are moved as bytes.
        dtype = torch.uint8 if self.rows.dtype.itemsize == 1 else self.rows.dtype
        rows = self.rows.view(dtype)
        target = None if out is None else out.view(dtype)
        if rows.is_contiguous():
            # Long rows are copied faster than short ones.
            rows = rows.view(len(rows), -1)
            target = None if target is None else target.view(len(ids), -1)
        rows = torch.index_select(rows, 0, ids, out=target)
        return StoredRows(rows.view(self.rows.dtype).view(len(ids), *self.rows.shape[1:]), scale)

    def row_scales(self) -> Tensor | None:
        """The scale of each row and head, contiguous [R, ...]."""
        if self.scale is None:
            return None
        if self._has_row_scales:
            return self.scale.contiguous()
        return self.scale.expand(self.rows.shape[:-1]).contiguous()

    def values(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """True values in dtype, computed in float32. The rows themselves where they are the values,
        else written into `out` if given."""
        if self.scale is None and self.rows.dtype == dtype:
            return self.rows
        if out is None:
            out = torch.empty(self.rows.shape, dtype=dtype, device=self.rows.device)
        if self.scale is None:
            return out.copy_(self.rows)
        scale = self.scale[..., None] if self._has_row_scales else self.scale
        # e4m3 numbers are exact in every model dtype.
        return torch.mul(self.rows.to(dtype), scale, out=out)

    @property
    def _has_row_scales(self) -> bool:
        return self.scale is not None and self.scale.shape == self.rows.shape[:-1]
