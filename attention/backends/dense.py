"""Attention over dense tensors with its LSE, on any device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.interface import AttentionResult

_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(
    q: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> AttentionResult:
    """Attention with natural-log LSE. Every query must see at least one key.

    q: [B, Hk, m, D]. key, value: [B, Hk, n, D] of equal width. bias: float32, broadcastable to
    [B, Hk, m, n], 0 or -inf. Returns out [B, Hk, m, D] and float32 lse [B, Hk, m].
    """
    if bias is not None:
        bias = bias.to(q.dtype)
    if q.device.type == "cpu":
        out, lse = _flash_on_cpu(q, key, value, attn_mask=bias, scale=scale)
        return AttentionResult(out, lse)
    return attend_by_matmul(q, key, value, bias, scale)


def attend_by_matmul(
    q: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> AttentionResult:
    """`attend` for devices without a fused kernel that returns its LSE."""
    scores = torch.matmul(q.float() * scale, key.float().transpose(-1, -2))
    if bias is not None:
        scores = scores + bias
    out = torch.matmul(torch.softmax(scores, dim=-1), value.float())
    return AttentionResult(out.to(q.dtype), torch.logsumexp(scores, dim=-1))


def attend_causal(q: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Causal attention of the last m positions over n keys.

    q: [B, h, m, D], key [B, h, n, D], value [B, h, n, Dv], n >= m. mask: a causal mask whose
    bottom right corner is used, as `lower_right_mask` makes it. Returns [B, h, m, Dv].
    """
    num_queries, num_keys = q.shape[-2], key.shape[-2]
    width = value.shape[-1]
    if q.device.type == "cpu" and width < q.shape[-1]:
        # The fast CPU kernel wants values as wide as keys.
        value = F.pad(value, (0, q.shape[-1] - width))
    if num_queries == num_keys:
        out = F.scaled_dot_product_attention(q, key, value, is_causal=True, scale=scale)
        return out[..., :width]
    block = mask.shape[0]
    outs = []
    for start in range(0, num_queries, block):
        stop = min(start + block, num_queries)
        visible = num_keys - num_queries + stop
        corner = mask[block - (stop - start) :, mask.shape[1] - visible :]
        outs.append(
            F.scaled_dot_product_attention(
                q[..., start:stop, :],
                key[..., :visible, :],
                value[..., :visible, :],
                # GPU kernels read the mask in aligned vectors: a slice that begins anywhere will
                # not do ("misaligned address"), a copy does.
                attn_mask=corner.to(q.dtype, copy=q.device.type != "cpu"),
                scale=scale,
            )
        )
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-2)
    return out[..., :width]


def lower_right_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """float32 [num_queries, num_keys]: 0 where the last num_queries positions see, else -inf.

    The bottom right [m, n] corner is the mask of any smaller m and n.
    """
    mask = torch.zeros(num_queries, num_keys)
    return mask.masked_fill_(
        torch.ones(num_queries, num_keys, dtype=torch.bool).triu_(num_keys - num_queries + 1),
        float("-inf"),
    ).to(device)
