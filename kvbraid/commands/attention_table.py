"""Which attention backend this machine would take, by kind, operation and stripe width."""

from __future__ import annotations

import torch

from attention.dispatch import OPERATIONS, AttentionNeeds, UnsupportedCombination, choose
from attention.interface import GQAGeometry, MLAGeometry

_TP_SIZE = 8
_DCP_SIZES = (1, 2, 4, 8)
_PAGE_SIZE = 16
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


def attention_table() -> list[dict[str, str]]:
    """One row a kind and operation: for each c the backend, or "refused: why"."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [
        {"kind": kind, "operation": operation, "device": device}
        | {f"c={c}": _choice(kind, operation, c, device) for c in _DCP_SIZES}
        for kind in _KINDS
        for operation in OPERATIONS
    ]


def _choice(kind: str, operation: str, dcp_size: int, device: str) -> str:
    geometry, num_q_heads, num_kv_heads = _KINDS[kind]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    needs = AttentionNeeds(
        geometry=geometry,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        tp_size=_TP_SIZE,
        dcp_size=dcp_size,
        page_size=_PAGE_SIZE,
        device=device,
        dtype=dtype,
        kv_dtype=dtype,
        operations=frozenset({operation}),
    )
    try:
        return type(choose(needs).backend).__name__
    except UnsupportedCombination as refusal:
        return f"refused: {'; '.join(refusal.reasons)}"
