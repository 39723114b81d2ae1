"""FlashInfer's paged kernels for MLA and GQA, on NVIDIA GPUs. LSE of base 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attention import accelerator
from attention.backends.flashinfer_prefix import FlashInferPrefix
from attention.backends.flashinfer_wrappers import FlashInferWrappers
from attention.backends.kernel_limits import KernelLimits
from attention.backends.per_tensor_scale import FP8
from attention.backends.vendor_backend import PrefixPlan, VendorBackend
from attention.interface import MLAGeometry

if TYPE_CHECKING:
    from attention.dispatch import AttentionNeeds

GENERATIONS = ("fa2", "fa3", "best")
_HOPPER = "sm90"

LIMITS = KernelLimits(
    vendor="nvidia",
    oldest_capability=75,
    # The least that its mla.cuh has a tile for.
    latent_shared_memory=92672,
    modules={"flashinfer": "install flashinfer-python"},
    oldest={"flashinfer-python": (0, 6, 13)},
    latent_shapes=((512, 64),),
    head_dims=(64, 128, 256),
    dtypes=(torch.bfloat16, torch.float16),
    # For MLA it would copy the whole pool to the model dtype in each layer (SGLang PR 30444).
    gqa_kv_dtypes=(FP8,),
)


class FlashInferBackend(VendorBackend):
    """The `flashinfer` backend for MLA and GQA."""

    name = "flashinfer"
    limits = LIMITS

    def __init__(self, *, mla: str = "best", gqa: str = "fa2") -> None:
        """mla, gqa: generation of the kernels, "fa2" or "fa3" (Hopper only); "best" is fa3 where
        there is a Hopper GPU. fa2 cuts long sequences of GQA over the GPU, fa3 does not.

        Raises ValueError for other names.
        """
        super().__init__()
        for kind, generation in (("mla", mla), ("gqa", gqa)):
            if generation not in GENERATIONS:
                raise ValueError(f"{kind} {generation!r} is not one of {', '.join(GENERATIONS)}")
        self._mla = mla
        self._gqa = gqa
        self._wrappers: FlashInferWrappers | None = None

    def refusals(self, needs: AttentionNeeds) -> list[str]:
        """Also fa3 where it does not run."""
        reasons = super().refusals(needs)
        is_mla = isinstance(needs.geometry, MLAGeometry)
        generation = self._mla if is_mla else self._gqa
        if generation == "fa3" and not _is_hopper():
            reasons.append(f"fa3 kernels need a GPU of {_HOPPER}")
        if not is_mla and _named(generation) == "fa3" and needs.kv_dtype == FP8:
            reasons.append("fa3 kernels do not read an fp8 pool with 16-bit queries")
        return reasons

    def _plan_prefix(self, plan: PrefixPlan) -> FlashInferPrefix:
        """FlashInfer's own plan is made at the first layer's call."""
        if self._wrappers is None:
            self._wrappers = FlashInferWrappers(
                mla=_named(self._mla), gqa=_named(self._gqa), device=plan.device
            )
        return FlashInferPrefix(plan, wrappers=self._wrappers)


def _named(generation: str) -> str:
    if generation != "best":
        return generation
    return "fa3" if _is_hopper() else "fa2"


def _is_hopper() -> bool:
    found = accelerator.current_accelerator()
    return found is not None and found.architecture == _HOPPER
