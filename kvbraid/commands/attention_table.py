"""What each attention backend serves on this machine, by kind, operation and stripe width."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from attention.dispatch import (
    BACKENDS,
    OPERATIONS,
    AttentionNeeds,
    UnsupportedCombination,
    choose,
)
from attention.interface import GQAGeometry, MLAGeometry

DCP_SIZES = (1, 2, 4, 8)
_TP_SIZE = 8
# One that all kernels with paged pools take.
_PAGE_SIZE = 64
# Shapes that stand for their kind: Llama 3 8B and DeepSeek V3.
_KINDS: dict[str, tuple[GQAGeometry | MLAGeometry, int, int]] = {
    "gqa": (GQAGeometry(head_dim=128, softmax_scale=128**-0.5), 32, 8),
    "mla": (
        MLAGeometry(
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            softmax_scale=192**-0.5,
        ),
        128,
        1,
    ),
}


def attention_table(dcp_sizes: Sequence[int] = DCP_SIZES) -> list[dict[str, str]]:
    """One row a kind, backend and operation: for each c "ok" or the first reason against it.

    Rows of backend "auto" name the backend that would be taken instead of "ok".
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [
        {"kind": kind, "backend": backend, "operation": operation, "device": device}
        | {f"c={c}": _cell(_needs(kind, operation, c, device), backend) for c in dcp_sizes}
        for kind in _KINDS
        for backend in ("auto", *BACKENDS)
        for operation in OPERATIONS
    ]


def _needs(kind: str, operation: str, dcp_size: int, device: str) -> AttentionNeeds:
    geometry, num_q_heads, num_kv_heads = _KINDS[kind]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return AttentionNeeds(
        geometry=geometry,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        # Of 8 ranks where they can be grouped so, else of one group.
        tp_size=_TP_SIZE if dcp_size > 0 and _TP_SIZE % dcp_size == 0 else dcp_size,
        dcp_size=dcp_size,
        page_size=_PAGE_SIZE,
        device=device,
        dtype=dtype,
        kv_dtype=dtype,
        operations=frozenset({operation}),
    )


def _cell(needs: AttentionNeeds, backend: str) -> str:
    try:
        if backend == "auto":
            return _taken(replace(needs, operations=frozenset(OPERATIONS)))
        choose(needs, backend=backend)
    except UnsupportedCombination as refusal:
        return refusal.reasons[0].removeprefix(f"backend {backend}: ")
    return "ok"


def _taken(needs: AttentionNeeds) -> str:
    """As a worker takes it whose settings are all "auto": one backend for all operations, on a GPU
    one whose decode can be captured in graphs wherever there is one."""
    if needs.device == "cuda":
        with suppress(UnsupportedCombination):
            return choose(replace(needs, cuda_graphs=True)).backend.name
    return choose(needs).backend.name
