"""Takes a model's tensors from a checkpoint: shapes checked, slices only, nothing left over."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from kvbraid.errors import CheckpointError
from kvbraid.model.tensor_source import TensorSource

logger = logging.getLogger(__name__)


class WeightReader:
    """Hands out parts of named tensors in the model's dtype on the model's device."""

    def __init__(self, source: TensorSource, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._source = source
        self._expected: set[str] = set()

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Require `name` with `shape` without reading it: another rank keeps it.

        Raises CheckpointError naming the tensor when it is missing or has another shape.
        """
        stored = self._source.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self._source.origin}: tensor {name} {list(shape)} is missing")
        if stored.shape != shape:
            raise CheckpointError(
                f"{self._source.origin}: tensor {name} has shape {list(stored.shape)}; "
                f"the config asks for {list(shape)}"
            )
        self._expected.add(name)

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Rows (dimension 0) and columns (the last one) of `name`, whose full shape is `shape`.

        Only these are read. Errors are those of `expect`.
        """
        self.expect(name, shape)
        bounds = [range(size) for size in shape]
        if columns is not None:
            bounds[-1] = columns
        if rows is not None:
            bounds[0] = rows
        part = self._source.read(name, tuple(bounds))
        return part.to(device=self.device, dtype=dtype or self.dtype)

    def finish(self, known_extras: Mapping[str, re.Pattern[str]]) -> None:
        """Raises CheckpointError naming the first tensor that the model does not have.

        Tensors whose whole name matches one of `known_extras` (reason -> pattern) are logged.
        """
        skipped: dict[str, int] = {}
        for name in sorted(self._source.tensors.keys() - self._expected):
            reason = next((r for r, p in known_extras.items() if p.fullmatch(name)), None)
            if reason is None:
                raise CheckpointError(
                    f"{self._source.origin}: tensor {name} does not belong to this model"
                )
            skipped[reason] = skipped.get(reason, 0) + 1
        for reason, count in skipped.items():
            logger.info("%s: skipped %d tensors: %s", self._source.origin, count, reason)
