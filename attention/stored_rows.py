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


@dataclass(frozen=True, slots=True, eq=False)
class StoredPool:
    """All rows of a pool, [N * P, ..., width], of which some are taken as StoredRows.

    scale: float32 [1], or one a row and head, [N, ..., P]; None where the rows are the values.
    """

    rows: Tensor
    scale: Tensor | None = None

    @classmethod
    def of(cls, pages: Tensor, scale: Tensor | None) -> StoredPool:
        """The pool [N, P, ..., width] with scale [1] or [N, ..., P], without a copy.

        Raises ValueError for scales of another shape.
        """
        per_row = (pages.shape[0], *pages.shape[2:-1], pages.shape[1])
        if scale is not None and scale.shape not in ((1,), per_row):
            raise ValueError(
                f"scale of shape {tuple(scale.shape)} for pages of {tuple(pages.shape)}; expected "
                f"(1,) or {per_row}"
            )
        return cls(rows_of(pages), scale)

    def with_one_head(self) -> StoredPool:
        """Rows [N * P, width] as [N * P, 1, width]."""
        scale = self.scale
        if scale is not None and self._has_row_scales:
            scale = scale[:, None]
        return StoredPool(self.rows[:, None], scale)

    def narrow(self, start: int, length: int) -> StoredRows:
        """A run of rows, without a copy but of the scales of several heads."""
        scale = self.scale
        if scale is not None and self._has_row_scales:
            page_size = scale.shape[-1]
            pages = slice(start // page_size, -(-(start + length) // page_size))
            scale = scale[pages].movedim(-1, 1).flatten(0, 1)
            scale = scale.narrow(0, start % page_size, length)
        return StoredRows(self.rows.narrow(0, start, length), scale)

    def select(self, ids: Tensor, out: Tensor | None = None) -> StoredRows:
        """The rows with these int64 indices [n], written into `out` [n, ..., width] if given."""
        scale = self.scale
        if scale is not None and self._has_row_scales:
            page_size = scale.shape[-1]
            scale = scale.movedim(-1, 1)[ids // page_size, ids % page_size]
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

    @property
    def _has_row_scales(self) -> bool:
        return self.scale is not None and self.scale.dim() > 1
