"""Chooses backend and exchange at start-up, or refuses with every reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from attention.backends.base import AttentionBackend
from attention.backends.torch_backend import TorchBackend
from attention.backends.triton_backend import TritonBackend
from attention.dcp import Q_MODES
from attention.exchanges.a2a import A2AExchange
from attention.exchanges.ag_rs import AgRsExchange
from attention.exchanges.base import Exchange
from attention.interface import GQAGeometry, MLAGeometry
from attention.layout import HeadLayout, StripeLayout
from attention.rows import WINDOW_MASKS

# In order of preference where the choice is "auto".
BACKENDS: Mapping[str, Callable[[], AttentionBackend]] = {
    "triton": TritonBackend,
    "torch": TorchBackend,
}
EXCHANGES: Mapping[str, Callable[[], Exchange]] = {"a2a": A2AExchange, "ag_rs": AgRsExchange}

OPERATIONS = ("decode", "verify", "extend")


class UnsupportedCombination(ValueError):
    """No implementation serves what was asked for. `reasons` lists every obstacle."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("unsupported attention set-up: " + "; ".join(reasons))
        self.reasons = tuple(reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """Everything on which the choice depends, the same on every rank."""

    geometry: GQAGeometry | MLAGeometry
    num_q_heads: int
    """Query heads of the whole model."""
    num_kv_heads: int
    """KV heads of the whole model; 1 for MLA."""
    tp_size: int = 1
    dcp_size: int = 1
    page_size: int
    """Tokens of a physical page."""
    interleave: int = 1
    device: str = "cpu"
    """Torch device type."""
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    q_mode: str = "gather"
    operations: frozenset[str] = frozenset({"decode", "extend"})
    window_mask: str = "causal"
    """Mask of the window in verify."""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A backend and an exchange of this rank's own, and what the operator should know."""

    backend: AttentionBackend
    exchange: Exchange
    warnings: tuple[str, ...]


class _Option(Protocol):
    def refusals(self, needs: AttentionNeeds) -> list[str]: ...


OptionT = TypeVar("OptionT", bound=_Option)


def choose(
    needs: AttentionNeeds, *, backend: str = "auto", exchange: str = "auto"
) -> AttentionChoice:
    """The named backend and exchange, or for "auto" the first that serves `needs`.

    Raises UnsupportedCombination with every reason found, of the layout, the backends and the
    exchanges together.
    """
    reasons = layout_refusals(needs)
    chosen_backend = _first_that_serves("backend", BACKENDS, backend, needs, reasons)
    chosen_exchange = _first_that_serves("exchange", EXCHANGES, exchange, needs, reasons)
    if reasons or chosen_backend is None or chosen_exchange is None:
        raise UnsupportedCombination(reasons)
    return AttentionChoice(chosen_backend, chosen_exchange, warnings_of(needs))


def layout_refusals(needs: AttentionNeeds) -> list[str]:
    """Reasons that no backend could change: sizes that contradict one another, unknown names."""
    reasons = []
    for check in (
        lambda: HeadLayout(needs.num_q_heads, needs.num_kv_heads, needs.tp_size, 0, needs.dcp_size),
        lambda: StripeLayout(needs.dcp_size, 0, needs.page_size, needs.interleave),
    ):
        try:
            check()
        except ValueError as error:
            reasons.append(str(error))
    if needs.q_mode not in Q_MODES:
        reasons.append(f"q_mode {needs.q_mode!r} is not one of {Q_MODES}")
    if needs.window_mask not in WINDOW_MASKS:
        reasons.append(f"window_mask {needs.window_mask!r} is not one of {WINDOW_MASKS}")
    unknown = sorted(needs.operations.difference(OPERATIONS))
    if unknown:
        reasons.append(f"operations {unknown} are not among {OPERATIONS}")
    return reasons


def kv_bytes_per_token(needs: AttentionNeeds) -> float:
    """Bytes of one token's KV of one layer on a rank, averaged over positions."""
    if isinstance(needs.geometry, MLAGeometry):
        width = needs.geometry.kv_lora_rank + needs.geometry.qk_rope_head_dim
    else:
        layouts = (
            HeadLayout(needs.num_q_heads, needs.num_kv_heads, needs.tp_size, rank, needs.dcp_size)
            for rank in range(needs.tp_size)
        )
        width = 2 * needs.geometry.head_dim * max(len(heads.group_kv_heads) for heads in layouts)
    return width * needs.kv_dtype.itemsize / needs.dcp_size


def warnings_of(needs: AttentionNeeds) -> tuple[str, ...]:
    """What works but is probably not meant."""
    kept = kv_bytes_per_token(needs)
    for smaller in range(1, needs.dcp_size):
        if needs.tp_size % smaller:
            continue
        if kv_bytes_per_token(replace(needs, dcp_size=smaller)) <= kept:
            return (
                f"dcp_size {needs.dcp_size} saves no memory over {smaller}: with "
                f"{needs.num_kv_heads} KV heads on tp_size {needs.tp_size} either keeps "
                f"{kept:g} bytes per token and layer on a rank",
            )
    return ()


def _first_that_serves(
    kind: str,
    options: Mapping[str, Callable[[], OptionT]],
    name: str,
    needs: AttentionNeeds,
    reasons: list[str],
) -> OptionT | None:
    """Adds to `reasons` only if no option serves."""
    if name != "auto" and name not in options:
        reasons.append(f"{kind} {name!r} is not one of {', '.join(options)} or auto")
        return None
    refusals: list[str] = []
    for candidate in options if name == "auto" else (name,):
        option = options[candidate]()
        obstacles = option.refusals(needs)
        if not obstacles:
            return option
        refusals += [f"{kind} {candidate}: {obstacle}" for obstacle in obstacles]
    reasons += refusals
    return None
