"""The local work around the NCCL exchanges: cutting partial results into pieces for the ranks.

The wire format of a2a: one piece a destination, in rank order. A piece holds the values of its
T * heads rows, token by token, each row padded to whole words of 4 bytes, then their float32 LSEs,
then padding to 16 bytes: NCCL copies what is aligned to that much faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from attention.interface import AttentionResult
from attention.merge import merge_outputs, merge_weights, weigh

LSE_BYTES = 4
ALIGNMENT = 16


class Pieces(Protocol):
    """Packs, merges and weighs partial results. No collectives."""

    def pack(self, partial: AttentionResult, head_splits: Sequence[int]) -> Tensor:
        """out [T, H, Dv] and lse [T, H] -> uint8, the pieces of all ranks in the wire format."""
        ...

    def merge(self, received: Tensor, like: Tensor, num_heads: int) -> Tensor:
        """received: uint8 [c, piece_bytes(...)], from each rank the piece for this rank's
        `num_heads` heads; like: the out [T, H, Dv] that this rank packed. Returns
        [T, num_heads, Dv] of its dtype."""
        ...

    def weigh(self, out: Tensor, lses: Tensor, rank: int, head_splits: Sequence[int]) -> Tensor:
        """This rank's out [T, H, Dv] times its share by lses [c, T, H] of all ranks, cut into
        float32 [c, T, max(head_splits), Dv]; 0 past a rank's heads."""
        ...


def row_bytes(width: int, dtype: torch.dtype) -> int:
    """Bytes of one row's values on the wire and of its LSE."""
    return -(-width * dtype.itemsize // LSE_BYTES) * LSE_BYTES + LSE_BYTES


def piece_bytes(num_rows: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of a piece of num_rows rows, padding included."""
    return -(-num_rows * row_bytes(width, dtype) // ALIGNMENT) * ALIGNMENT


class TorchPieces:
    """Stock torch operators, for CPU."""

    def pack(self, partial: AttentionResult, head_splits: Sequence[int]) -> Tensor:
        """See Pieces."""
        out, lse = partial
        width, dtype = out.shape[2], out.dtype
        if _columns(width, dtype) > width:
            out = functional.pad(out, (0, _columns(width, dtype) - width))
        parts: list[Tensor] = []
        for values, lses in zip(
            out.split_with_sizes(list(head_splits), dim=1),
            lse.split_with_sizes(list(head_splits), dim=1),
            strict=True,
        ):
            num_bytes = lses.numel() * row_bytes(width, dtype)
            padding = piece_bytes(lses.numel(), width, dtype) - num_bytes
            parts += [_as_bytes(values), _as_bytes(lses)]
            if padding:
                parts.append(lse.new_zeros(padding, dtype=torch.uint8))
        return torch.cat(parts)

    def merge(self, received: Tensor, like: Tensor, num_heads: int) -> Tensor:
        """See Pieces."""
        num_tokens, _, width = like.shape
        if not num_tokens * num_heads:
            return like.new_empty(num_tokens, num_heads, width)
        shape = (received.shape[0], num_tokens, num_heads)
        columns = _columns(width, like.dtype)
        lse_start = num_tokens * num_heads * columns * like.dtype.itemsize
        lse_end = lse_start + num_tokens * num_heads * LSE_BYTES
        values = received[:, :lse_start].view(like.dtype).reshape(*shape, columns)
        lse = received[:, lse_start:lse_end].contiguous().view(torch.float32).view(shape)
        return merge_outputs(values[..., :width], lse)

    def weigh(self, out: Tensor, lses: Tensor, rank: int, head_splits: Sequence[int]) -> Tensor:
        """See Pieces."""
        pieces = weigh(out.float(), merge_weights(lses)[rank]).split_with_sizes(
            list(head_splits), dim=1
        )
        if len(set(head_splits)) == 1:
            return torch.stack(pieces)
        num_tokens, _, width = out.shape
        send = out.new_zeros(len(pieces), num_tokens, max(head_splits), width, dtype=torch.float32)
        for slot, piece in zip(send, pieces, strict=True):
            slot[:, : piece.shape[1]] = piece
        return send


@lru_cache
def pieces_for(device_type: str) -> Pieces:
    """The implementation for tensors of a device type: our kernels on GPUs."""
    if device_type == "cuda":
        from attention.exchanges.triton_pieces import TritonPieces

        return TritonPieces()
    return TorchPieces()


def _columns(width: int, dtype: torch.dtype) -> int:
    return (row_bytes(width, dtype) - LSE_BYTES) // dtype.itemsize


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
