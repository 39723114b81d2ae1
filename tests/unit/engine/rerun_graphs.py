"""Stand-ins that let decode be "captured" on CPU: a graph that runs its launches again, and a
torch backend whose plans are written into one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attention.backends.base import DecodeCall, DecodeKernel
from attention.backends.torch_backend import TorchBackend
from attention.interface import AttentionResult, GQACache, MLACache
from attention.rows import DecodeBounds, DecodeRows


class RerunGraphs:
    """A GraphCapture. replays: indices of captures, in the order of replay. on_capture: called
    after each capture."""

    def __init__(self) -> None:
        self.replays: list[int] = []
        self.num_captures = 0
        self.on_capture: Callable[[], None] = lambda: None

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        number = self.num_captures
        self.num_captures += 1
        compute()
        self.on_capture()

        def replay() -> None:
            self.replays.append(number)
            compute()

        return replay


class ReplannedDecode:
    """A ReservedDecode and its kernel: computes the step that was filled in last."""

    def __init__(self, backend: TorchBackend, call: DecodeCall, device: torch.device) -> None:
        self._backend, self._call, self._device = backend, call, device
        self._kernel: DecodeKernel | None = None
        self._rows: DecodeRows | None = None

    def grow(self) -> None:
        assert self._rows is not None
        lens = tuple(length + 1 if length else 0 for length in self._rows.committed_lens)
        self.fill(replace(self._rows, committed_lens=lens))

    def fill(self, rows: DecodeRows) -> ReplannedDecode:
        self._rows = rows
        self._kernel = self._backend.plan_decode(
            rows,
            kv_index=self._call.kv_index,
            scale=self._call.scale,
            value_width=self._call.value_width,
            device=self._device,
        )
        return self

    def gqa(
        self, q: Tensor, cache: GQACache, window_key: Tensor | None, window_value: Tensor | None
    ) -> AttentionResult:
        assert self._kernel is not None
        return self._kernel.gqa(q, cache, window_key, window_value)

    def mla(self, q: Tensor, cache: MLACache, window_latent: Tensor | None) -> AttentionResult:
        assert self._kernel is not None
        return self._kernel.mla(q, cache, window_latent)


class ReplannedTorchBackend(TorchBackend):
    """A CapturableBackend for CPU."""

    def reserve_decode(
        self, bounds: DecodeBounds, call: DecodeCall, device: torch.device
    ) -> ReplannedDecode:
        return ReplannedDecode(self, call, device)
