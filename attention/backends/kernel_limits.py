"""What a vendor's kernel serves, as data that start-up turns into reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from attention import accelerator
from attention.interface import MLAGeometry

if TYPE_CHECKING:
    from attention.dispatch import AttentionNeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLimits:
    """Where and for what a kernel runs. Empty tuples and None mean no limit.

    architectures: of accelerators, in the words of accelerator.Accelerator.
    oldest_capability: compute capability of NVIDIA GPUs, 75 for 7.5.
    latent_shared_memory: bytes that the kernels of MLA need.
    modules: importable name -> how to get it.
    oldest: distribution -> first release whose call has the parameters that we pass.
    latent_shapes: (kv_lora_rank, qk_rope_head_dim) pairs served; empty: MLA is not served.
    head_dims: of GQA; empty: GQA is not served.
    latent_kv_dtypes, gqa_kv_dtypes: beside the model dtype itself.
    max_batch_size: sequences of a launch; a window's queries go as heads (see latent_prefix).
    """

    vendor: str
    architectures: tuple[str, ...] = ()
    oldest_capability: int = 0
    latent_shared_memory: int = 0
    modules: Mapping[str, str] = field(default_factory=dict)
    oldest: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    latent_shapes: tuple[tuple[int, int], ...] = ()
    head_dims: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...]
    latent_kv_dtypes: tuple[torch.dtype, ...] = ()
    gqa_kv_dtypes: tuple[torch.dtype, ...] = ()
    page_sizes: tuple[int, ...] = ()
    max_batch_size: int | None = None

    def refusals(self, needs: AttentionNeeds) -> list[str]:
        """Every limit that `needs` breaks, with the value and what is accepted."""
        return [
            *self._device_refusals(needs),
            *self._package_refusals(),
            *self._shape_refusals(needs),
            *self._dtype_refusals(needs),
            *self._batch_refusals(needs),
        ]

    def _device_refusals(self, needs: AttentionNeeds) -> list[str]:
        if needs.device != "cuda":
            return [f"device {needs.device!r} is not cuda"]
        found = accelerator.current_accelerator()
        if found is None:
            return ["no GPU is visible"]
        if found.vendor != self.vendor:
            return [f"GPU vendor {found.vendor} is not {self.vendor}"]
        if self.architectures and found.architecture not in self.architectures:
            return [f"GPU {found.architecture} is not one of {_listed(self.architectures)}"]
        if accelerator.is_nvidia_before(found, self.oldest_capability):
            return [f"GPU {found.architecture} is older than sm{self.oldest_capability}"]
        there = accelerator.small_shared_memory(found)
        is_mla = isinstance(needs.geometry, MLAGeometry)
        if is_mla and there is not None and there < self.latent_shared_memory:
            return [
                f"MLA needs {self.latent_shared_memory} bytes of shared memory; "
                f"GPU {found.architecture} has {there}"
            ]
        return []

    def _package_refusals(self) -> list[str]:
        absent = [
            f"{name} is not installed: {remedy}"
            for name, remedy in self.modules.items()
            if not accelerator.has_module(name)
        ]
        releases = {name: accelerator.version_of(name) for name in self.oldest}
        old = [
            f"{name} {_dotted(release)} is older than {_dotted(self.oldest[name])}"
            for name, release in releases.items()
            if release is not None and release < self.oldest[name]
        ]
        return absent + old

    def _shape_refusals(self, needs: AttentionNeeds) -> list[str]:
        geometry = needs.geometry
        if not isinstance(geometry, MLAGeometry):
            if not self.head_dims:
                return ["GQA is not served, only MLA"]
            if geometry.head_dim not in self.head_dims:
                return [f"head_dim {geometry.head_dim} is not one of {_listed(self.head_dims)}"]
            return []
        shape = (geometry.kv_lora_rank, geometry.qk_rope_head_dim)
        if shape in self.latent_shapes:
            return []
        accepted = _listed(f"{rank} + {rope}" for rank, rope in self.latent_shapes)
        return [f"kv_lora_rank {shape[0]} + qk_rope_head_dim {shape[1]} is not one of {accepted}"]

    def _dtype_refusals(self, needs: AttentionNeeds) -> list[str]:
        reasons = []
        if needs.dtype not in self.dtypes:
            reasons.append(f"dtype {needs.dtype} is not one of {_listed(self.dtypes)}")
        is_mla = isinstance(needs.geometry, MLAGeometry)
        others = self.latent_kv_dtypes if is_mla else self.gqa_kv_dtypes
        if needs.kv_dtype not in (needs.dtype, *others):
            accepted = _listed((needs.dtype, *others))
            reasons.append(f"KV dtype {needs.kv_dtype} is not one of {accepted}")
        elif needs.kv_dtype != needs.dtype and needs.kv_scale != "tensor":
            reasons.append(f"kv_scale {needs.kv_scale!r} is not 'tensor'")
        return reasons

    def _batch_refusals(self, needs: AttentionNeeds) -> list[str]:
        reasons = []
        if self.page_sizes and needs.page_size not in self.page_sizes:
            accepted = _listed(self.page_sizes)
            reasons.append(f"page_size {needs.page_size} is not one of {accepted}")
        limit, asked = self.max_batch_size, needs.max_batch_size
        if limit is not None and asked is not None and asked > limit:
            reasons.append(f"max_batch_size {asked} is above {limit}")
        return reasons


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
