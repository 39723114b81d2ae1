"""Chooses backend and exchange at start-up, or refuses with every reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import TypeVar

import torch

from attention import accelerator, measured_choice
from attention.backends.aiter_mla import AiterBackend
from attention.backends.base import AttentionBackend, CapturableBackend
from attention.backends.cutedsl_mla import CuteDslMlaBackend
from attention.backends.flashinfer_backend import FlashInferBackend
from attention.backends.tokenspeed_mla import TokenspeedMlaBackend
from attention.backends.torch_backend import TorchBackend
from attention.backends.triton_backend import TritonBackend
from attention.backends.trtllm_mla import TrtllmMlaBackend
from attention.dcp import Q_MODES
from attention.exchanges.a2a import A2AExchange
from attention.exchanges.ag_rs import AgRsExchange
from attention.exchanges.base import Exchange
from attention.exchanges.fused import FusedExchange
from attention.interface import GQAGeometry, MLAGeometry
from attention.layout import HeadLayout, StripeLayout
from attention.rows import WINDOW_MASKS

# For "auto" they are tried as measured_choice prefers them, then in this order.
BACKENDS: Mapping[str, Callable[[], AttentionBackend]] = {
    "triton": TritonBackend,
    "flashinfer": FlashInferBackend,
    "trtllm_mla": TrtllmMlaBackend,
    "cutedsl_mla": CuteDslMlaBackend,
    "tokenspeed_mla": TokenspeedMlaBackend,
    "aiter": AiterBackend,
    "torch": TorchBackend,
}
EXCHANGES: Mapping[str, Callable[[], Exchange]] = {
    "fused": FusedExchange,
    "a2a": A2AExchange,
    "ag_rs": AgRsExchange,
}

OPERATIONS = ("decode", "verify", "extend")
KV_SCALES = ("tensor", "token")


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
    kv_scale: str = "tensor"
    """What has a scale of its own in an fp8 pool."""
    max_batch_size: int | None = None
    """Most sequences of a step, whatever their window, where the caller bounds them."""
    num_hosts: int = 1
    """Hosts over which a DCP group is spread."""
    cuda_graphs: bool = False
    """Whether decode is to be captured in CUDA graphs and replayed for other lengths."""

    @property
    def num_widened_heads(self) -> int:
        """Query heads of the largest DCP group, on which kernels' regimes depend."""
        return -(-self.num_q_heads * self.dcp_size // max(1, self.tp_size))


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A backend and an exchange of this rank's own, and what the operator should know."""

    backend: AttentionBackend
    exchange: Exchange
    warnings: tuple[str, ...]


OptionT = TypeVar("OptionT")


def choose(
    needs: AttentionNeeds, *, backend: str = "auto", exchange: str = "auto"
) -> AttentionChoice:
    """The named backend and exchange, or for "auto" the first that serves `needs`.

    Raises UnsupportedCombination with every reason found, of the layout, the backends and the
    exchanges together.
    """
    reasons = layout_refusals(needs)
    ordered = {name: BACKENDS[name] for name in preferred_backends(needs)}
    chosen_backend = _first_that_serves(
        "backend", ordered, backend, lambda option: refusals_of(option, needs), reasons
    )
    chosen_exchange = _first_that_serves(
        "exchange", EXCHANGES, exchange, lambda option: option.refusals(needs), reasons
    )
    if reasons or chosen_backend is None or chosen_exchange is None:
        raise UnsupportedCombination(reasons)
    return AttentionChoice(chosen_backend, chosen_exchange, warnings_of(needs))


def preferred_backends(needs: AttentionNeeds) -> tuple[str, ...]:
    """All backends in the order in which "auto" tries them."""
    kind = measured_choice.MLA if isinstance(needs.geometry, MLAGeometry) else measured_choice.GQA
    found = accelerator.current_accelerator() if needs.device == "cuda" else None
    architecture = None if found is None else found.architecture
    first = measured_choice.preference(kind, architecture, needs.num_widened_heads).backends
    return (*first, *(name for name in BACKENDS if name not in first))


def refusals_of(backend: AttentionBackend, needs: AttentionNeeds) -> list[str]:
    """Every reason why `backend` cannot serve `needs`, which fit together otherwise."""
    reasons = backend.refusals(needs)
    if needs.cuda_graphs and not isinstance(backend, CapturableBackend):
        reasons.append("its decode cannot be captured in a CUDA graph")
    return reasons


def layout_refusals(needs: AttentionNeeds) -> list[str]:
    """Reasons that no backend could change: sizes that contradict one another, unknown names, a
    dtype that the GPU does not have."""
    return [
        *_size_refusals(needs),
        *_geometry_refusals(needs),
        *_name_refusals(needs),
        *_gpu_refusals(needs),
    ]


def _size_refusals(needs: AttentionNeeds) -> list[str]:
    reasons = []
    for check in (
        lambda: HeadLayout(needs.num_q_heads, needs.num_kv_heads, needs.tp_size, 0, needs.dcp_size),
        lambda: StripeLayout(needs.dcp_size, 0, needs.page_size, needs.interleave),
    ):
        try:
            check()
        except ValueError as error:
            reasons.append(str(error))
    batch_size = needs.max_batch_size
    if batch_size is not None and batch_size < 1:
        reasons.append(f"max_batch_size {batch_size} must be >= 1")
    if not 1 <= needs.num_hosts <= max(1, needs.dcp_size):
        reasons.append(f"num_hosts {needs.num_hosts} is outside [1, dcp_size {needs.dcp_size}]")
    return reasons


def _geometry_refusals(needs: AttentionNeeds) -> list[str]:
    geometry = needs.geometry
    reasons = []
    if isinstance(geometry, MLAGeometry):
        if needs.num_kv_heads != 1:
            reasons.append(f"num_kv_heads {needs.num_kv_heads} must be 1 for MLA")
        widths = {
            "kv_lora_rank": geometry.kv_lora_rank,
            "qk_nope_head_dim": geometry.qk_nope_head_dim,
            "qk_rope_head_dim": geometry.qk_rope_head_dim,
            "v_head_dim": geometry.v_head_dim,
        }
    else:
        widths = {"head_dim": geometry.head_dim}
    reasons += [f"{name} {width} must be >= 1" for name, width in widths.items() if width < 1]
    scale = geometry.softmax_scale
    if not (isfinite(scale) and scale > 0):
        reasons.append(f"softmax_scale {scale} must be a finite number above 0")
    return reasons


def _name_refusals(needs: AttentionNeeds) -> list[str]:
    reasons = [
        f"{name} {value!r} is not one of {_listed(accepted)}"
        for name, value, accepted in (
            ("q_mode", needs.q_mode, Q_MODES),
            ("window_mask", needs.window_mask, WINDOW_MASKS),
            ("kv_scale", needs.kv_scale, KV_SCALES),
        )
        if value not in accepted
    ]
    unknown = sorted(needs.operations.difference(OPERATIONS))
    if unknown:
        reasons.append(f"operations {unknown} are not among {_listed(OPERATIONS)}")
    if not needs.operations:
        reasons.append(f"operations are empty; name some of {_listed(OPERATIONS)}")
    if needs.cuda_graphs and needs.device != "cuda":
        reasons.append(f"CUDA graphs need device 'cuda', not {needs.device!r}")
    return reasons


def _gpu_refusals(needs: AttentionNeeds) -> list[str]:
    found = accelerator.current_accelerator() if needs.device == "cuda" else None
    if found is None or needs.dtype != torch.bfloat16 or accelerator.has_bfloat16(found):
        return []
    return [
        f"GPU {found.architecture} has no {needs.dtype}, sm80 and newer have: torch.float16 and "
        "torch.float32 are served"
    ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


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
    refusals: Callable[[OptionT], list[str]],
    reasons: list[str],
) -> OptionT | None:
    """Adds to `reasons` only if no option serves."""
    if name != "auto" and name not in options:
        reasons.append(f"{kind} {name!r} is not one of {', '.join(options)} or auto")
        return None
    found: list[str] = []
    for candidate in options if name == "auto" else (name,):
        option = options[candidate]()
        obstacles = refusals(option)
        if not obstacles:
            return option
        found += [f"{kind} {candidate}: {obstacle}" for obstacle in obstacles]
    reasons += found
    return None
