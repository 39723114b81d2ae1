"""What the adapters of vendors' decode kernels have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attention import accelerator
from attention.backends.kernel_limits import KernelLimits
from attention.backends.live_prefix import LivePrefix, live_prefix
from attention.backends.prefix_and_window import PrefixAndWindowKernel, PrefixKernel
from attention.backends.torch_backend import TorchBackend
from attention.backends.triton_backend import TritonBackend
from attention.rows import DecodeRows, ExtendRows

if TYPE_CHECKING:
    from attention.backends.base import AttentionBackend, ExtendKernel
    from attention.dispatch import AttentionNeeds


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """What a step's prefix kernel is planned from; arguments as in AttentionBackend.plan_decode."""

    live: LivePrefix
    kv_index: tuple[int, ...]
    scale: float
    value_width: int
    device: torch.device


class VendorBackend(ABC):
    """An AttentionBackend whose decode kernel is a vendor's; extend is the triton backend's, or
    the torch backend's where there is no triton.

    A subclass converts the kernel's lse to natural log where it gets it. Emptiness, the window of
    a verify step and its merge are dealt with here, the same way for all.
    """

    name: str
    limits: KernelLimits

    def __init__(self) -> None:
        self._extend = _extend_backend()

    def refusals(self, needs: AttentionNeeds) -> list[str]:
        """The kernel's limits and, if extend is needed, those of its backend."""
        reasons = self.limits.refusals(needs)
        if "extend" in needs.operations:
            only_extend = replace(needs, operations=frozenset({"extend"}))
            reasons += [
                f"extend on {self._extend.name}: {reason}"
                for reason in self._extend.refusals(only_extend)
            ]
        return reasons

    def plan_decode(
        self,
        rows: DecodeRows,
        *,
        kv_index: tuple[int, ...],
        scale: float,
        value_width: int,
        device: torch.device,
    ) -> PrefixAndWindowKernel:
        """See AttentionBackend."""
        live = live_prefix(rows, device)
        return PrefixAndWindowKernel(
            rows,
            live=live,
            prefix=self._plan_prefix(PrefixPlan(live, kv_index, scale, value_width, device)),
            kv_index=kv_index,
            scale=scale,
            value_width=value_width,
            device=device,
        )

    @abstractmethod
    def _plan_prefix(self, plan: PrefixPlan) -> PrefixKernel:
        """The kernel over this step's committed prefixes. `plan.live` may hold no sequence; the
        kernel is then not called."""

    def plan_extend(
        self, rows: ExtendRows, *, kv_index: tuple[int, ...], scale: float, device: torch.device
    ) -> ExtendKernel:
        """See AttentionBackend."""
        return self._extend.plan_extend(rows, kv_index=kv_index, scale=scale, device=device)


def _extend_backend() -> AttentionBackend:
    if accelerator.current_accelerator() is not None and accelerator.has_module("triton"):
        return TritonBackend()
    return TorchBackend()
