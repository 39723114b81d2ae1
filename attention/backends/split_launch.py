"""The launch of a split kernel: which one serves a layer's call, and its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention.backends import triton_fp8_kernel, triton_kernels
from attention.backends.decode_launch import DecodeLaunch, KeyForm, launch_options, unpacks_fp8
from attention.backends.device_plan import BLOCK_KEYS, DevicePlan

# SCALES of the kernels.
_NO_SCALES, _ONE_SCALE, _TOKEN_SCALES = range(3)


class LayerKeys(NamedTuple):
    """Keys and values of one layer: pools [N, P, ...], windows [B*w, ...]; one latent in MLA."""

    key: Tensor
    value: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None
    window_key: Tensor | None
    window_value: Tensor | None


@dataclass(frozen=True, slots=True)
class SplitLaunch:
    """One layer's launch.

    step: launch shapes of its step; q: [B*w, H, dim + pe], contiguous; qk_scale: of scores, base 2;
    results: out, lse and the buffers of the partial ones.
    """

    step: DecodeLaunch
    form: KeyForm
    plan: DevicePlan
    q: Tensor
    keys: LayerKeys
    qk_scale: float
    results: tuple[Tensor, Tensor, Tensor, Tensor]

    def run(self) -> None:
        """Launch the kernel that serves the call. Raises ValueError, see `_scale_kind`."""
        shape = self.step.shape(self.form)
        if shape.wide:
            self._run_wide()
        elif shape.gluon and self.form.kv_dtype.itemsize == 1:
            self._run_hopper_fp8()
        elif shape.gluon:
            self._run_hopper()
        elif self.step.has_pairs(self.form):
            self._run_pairs()
        else:
            self._run_portable()

    @property
    def _grid(self) -> tuple[int, int]:
        return self.step.num_row_blocks(self.step.shape(self.form)), self.plan.num_workers

    def _run_wide(self) -> None:
        from attention.backends import gluon_mla_wide_kernel

        rows = self.step.rows
        gluon_mla_wide_kernel.split_mla_wide[self._grid](
            *gluon_mla_wide_kernel.descriptors(self.q),
            *gluon_mla_wide_kernel.descriptors(self.keys.key),
            *gluon_mla_wide_kernel.descriptors(self._or_q(self.keys.window_key)),
            *self._tables(),
            NUM_HEADS=self.step.num_heads,
            WINDOW=rows.window,
            HAS_WINDOW=rows.has_window,
            CAUSAL=rows.window_mask == "causal",
            PAGE_SIZE=rows.page_size,
            maxnreg=gluon_mla_wide_kernel.MAX_REGISTERS,
            **self._warps(),
        )

    def _run_hopper_fp8(self) -> None:
        from attention.backends import gluon_mla_fp8_kernel

        scale, kind = self.keys.key_scale, _scale_kind(self.keys)
        gluon_mla_fp8_kernel.split_mla_fp8[self._grid](
            self.q,
            *gluon_mla_fp8_kernel.descriptors(self.keys.key, scale),
            self.q if scale is None else scale,
            *self._tables(),
            NUM_HEADS=self.step.num_heads,
            PAGE_SIZE=self.step.rows.page_size,
            SCALES=kind,
            maxnreg=gluon_mla_fp8_kernel.MAX_REGISTERS,
            **self._warps(),
        )

    def _run_hopper(self) -> None:
        from attention.backends import gluon_mla_kernel

        latent, form, shape = self.keys.key, self.form, self.step.shape(self.form)
        has_tma = self.step.rows.page_size % BLOCK_KEYS == 0
        descriptors: tuple[object, ...] = (latent, latent)
        if has_tma:
            descriptors = gluon_mla_kernel.descriptors(latent, form.dim, form.pe)
        gluon_mla_kernel.split_mla[self._grid](
            self.q,
            latent,
            *descriptors,
            self._or_q(self.keys.window_key),
            *self._tables(),
            TMA=has_tma,
            SWAP=shape.swap,
            PRODUCT_FIRST=shape.product_first,
            **self._constants(),
        )

    def _run_pairs(self) -> None:
        keys, dims = self.keys, self.form
        pairs = keys._replace(key=keys.key.view(torch.int16), value=keys.value.view(torch.int16))
        triton_fp8_kernel.split_fp8[self._grid](
            *self._pool_arguments(pairs),
            HALF_PAD=_padded(dims.dim // 2),
            HALF_PE_PAD=_padded(dims.pe // 2),
            PTX=unpacks_fp8(self.step.device),
            **self._pool_constants(),
            **self._constants(),
        )

    def _run_portable(self) -> None:
        triton_kernels.split_attention[self._grid](
            *self._pool_arguments(self.keys),
            DIM_PAD=_padded(self.form.dim),
            PE_PAD=_padded(self.form.pe),
            SWAP=self.step.shape(self.form).swap,
            **self._pool_constants(),
            **self._constants(),
        )

    def _tables(self) -> tuple[object, ...]:
        """What every kernel gets of results and plan, where they do not have head_starts."""
        plan = self.plan
        return (
            *self.results,
            plan.page_table,
            plan.workers,
            plan.pieces,
            self.qk_scale,
            plan.page_table.stride(0),
        )

    def _pool_arguments(self, keys: LayerKeys) -> tuple[object, ...]:
        """Arguments of split_attention and split_fp8."""
        plan = self.plan
        return (
            self.q,
            keys.key,
            keys.value,
            *(self.q if s is None else s for s in (keys.key_scale, keys.value_scale)),
            self._or_q(keys.window_key),
            self._or_q(keys.window_value),
            *self.results,
            plan.page_table,
            plan.workers,
            plan.pieces,
            plan.head_starts,
            self.qk_scale,
            plan.page_table.stride(0),
            keys.key.stride(1),
            keys.value.stride(1),
        )

    def _or_q(self, window: Tensor | None) -> Tensor:
        """A pointer argument for a window, also where there is none to read."""
        return self.q if window is None else window.contiguous()

    def _warps(self) -> dict[str, Any]:
        shape = self.step.shape(self.form)
        return {"num_warps": shape.num_warps, **launch_options(self.step.device)}

    def _constants(self) -> dict[str, Any]:
        """What kernels for more than one width are compiled for."""
        rows = self.step.rows
        return {
            "NUM_HEADS": self.step.num_heads,
            "WINDOW": rows.window,
            "HAS_WINDOW": rows.has_window,
            "CAUSAL": rows.window_mask == "causal",
            "PAGE_SIZE": rows.page_size,
            "DIM": self.form.dim,
            "PE": self.form.pe,
            "BLOCK_ROWS": self.step.shape(self.form).block_rows,
            **self._warps(),
        }

    def _pool_constants(self) -> dict[str, Any]:
        """What split_attention and split_fp8 are compiled for, beside _constants."""
        shape = self.step.shape(self.form)
        limit = {} if shape.max_registers is None else {"maxnreg": shape.max_registers}
        return {
            "NUM_KV_HEADS": self.step.num_kv_heads,
            "GROUP": self.step.group_size,
            "IS_MLA": self.form.is_mla,
            "SCALES": _scale_kind(self.keys),
            "BLOCK_KEYS": shape.block_keys,
            "BLOCK_WINDOW": 16,
            "STAGES": shape.num_stages,
            **limit,
        }


def _scale_kind(keys: LayerKeys) -> int:
    """SCALES of the kernels. Raises ValueError where keys and values have scales of two kinds,
    or scales with gaps."""
    kinds = [
        _NO_SCALES if s is None else _ONE_SCALE if s.numel() == 1 else _TOKEN_SCALES
        for s in (keys.key_scale, keys.value_scale)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError("keys and values must both have one scale, one a token, or none")
    for scale in (keys.key_scale, keys.value_scale):
        if scale is not None and not scale.is_contiguous():
            raise ValueError(
                f"scales of shape {tuple(scale.shape)} have strides {scale.stride()}; the kernels "
                "read contiguous ones"
            )
    return kinds[0]


def _padded(width: int) -> int:
    """The next power of two that a tile of the portable kernels can have."""
    return max(16, 1 << (width - 1).bit_length())
