"""FlashInfer's wrapper objects of one rank, made once and planned anew each step."""

from __future__ import annotations

import importlib
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

_WORKSPACE_BYTES = 256 << 20


class FlashInferWrappers:
    """One wrapper a kind of step. They keep what they planned, so each serves one step at a time.

    Kernel generations are always named: `auto` may change its mind with dtypes and shapes.
    """

    def __init__(self, *, mla: str, gqa: str, device: torch.device) -> None:
        """mla, gqa: "fa2" or "fa3"."""
        self._mla = mla
        self._gqa = gqa
        self._device = device

    @cached_property
    def latent(self) -> Any:
        """MLA decode and verify: flashinfer.mla.BatchMLAPagedAttentionWrapper."""
        module = importlib.import_module("flashinfer.mla")
        return module.BatchMLAPagedAttentionWrapper(self._workspace(), backend=self._mla)

    @cached_property
    def decode(self) -> Any:
        """GQA decode: flashinfer.BatchDecodeWithPagedKVCacheWrapper on tensor cores, which serve
        any number of query heads a KV head."""
        module = importlib.import_module("flashinfer")
        return module.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace(), "NHD", use_tensor_cores=True, backend=self._gqa
        )

    @cached_property
    def verify(self) -> Any:
        """GQA windows: flashinfer.BatchPrefillWithPagedKVCacheWrapper."""
        module = importlib.import_module("flashinfer")
        return module.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace(), "NHD", backend=self._gqa
        )

    def _workspace(self) -> Tensor:
        """Zeroed: "must be initialized to 0 for its first use"."""
        return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
