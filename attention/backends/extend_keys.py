"""Keys and values as the triton extend kernel reads them, also those that MLA expands."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, bmm, mm

from attention.interface import LatentExpansion


class ExtendKeys(NamedTuple):
    """key [n, Hk, D], value [n, Hk, Dv], and what else every head's keys end with, pe [n, Rr]."""

    key: Tensor
    value: Tensor
    pe: Tensor | None

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Three tensors also where there is no pe; the kernel then reads the first two."""
        return self.key, self.value, self.key if self.pe is None else self.pe

    @property
    def strides(self) -> tuple[int, ...]:
        """As the kernel takes them: of keys and values between rows and heads, of pe of rows."""
        key, value, pe = self.parts
        return key.stride(0), key.stride(1), value.stride(0), value.stride(1), pe.stride(0)

    @property
    def widths(self) -> dict[str, int]:
        """Columns of a key without pe, of pe and of a value, and the tiles that they fill."""
        key, pe = self.key.shape[-1], 0 if self.pe is None else self.pe.shape[-1]
        value = self.value.shape[-1]
        padded = {"DIM_PAD": padded_width(key), "PE_PAD": padded_width(pe)}
        return {"DIM": key, "PE": pe, "VALUE": value, "VALUE_PAD": padded_width(value), **padded}


def expand_latent(latent: Tensor, expansion: LatentExpansion) -> ExtendKeys:
    """latent [n, R + Rr] -> keys and values of every head, token by token.

    The rope part is the same for all heads and stays where it is.
    """
    num_heads, key_width, rank = expansion.w_kc.shape
    compressed = latent[:, :rank]
    key = latent.new_empty(len(latent), num_heads, key_width)
    mm(compressed, expansion.w_kc.flatten(0, 1).t(), out=key.view(len(latent), -1))
    value = latent.new_empty(len(latent), num_heads, expansion.w_vc.shape[-1])
    bmm(compressed.expand(num_heads, -1, -1), expansion.w_vc, out=value.transpose(0, 1))
    return ExtendKeys(key, value, latent[:, rank:])


def unit_stride(tensor: Tensor) -> Tensor:
    """The tensor with columns side by side; a copy only where they are not."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def can_copy(tensor: Tensor) -> bool:
    """Whether the copy engine takes rows of this tensor: aligned, of 16-bit, tile-wide rows."""
    strides = tensor.stride()[:-1]
    return (
        tensor.element_size() == 2
        and tensor.shape[-1] == padded_width(tensor.shape[-1])
        and tensor.data_ptr() % 16 == 0
        and all(stride > 0 and stride % 8 == 0 for stride in strides)
    )


def padded_width(width: int) -> int:
    """The next power of two that a tile can have."""
    return max(16, 1 << (width - 1).bit_length()) if width else 16
