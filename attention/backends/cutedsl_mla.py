"""The CuTe DSL MLA decode kernel of FlashInfer. Natural-log LSE."""

from __future__ import annotations

import torch

from attention.backends.kernel_limits import KernelLimits
from attention.backends.lse_base import LseBase
from attention.backends.per_tensor_scale import FP8
from attention.backends.split_workspace import split_workspace_bytes
from attention.backends.trtllm_family import TrtllmFamilyBackend

LIMITS = KernelLimits(
    vendor="nvidia",
    architectures=("sm100", "sm103"),
    modules={
        "flashinfer": "install flashinfer-python",
        "cutlass": "install nvidia-cutlass-dsl",
    },
    oldest={"flashinfer-python": (0, 6, 13)},
    latent_shapes=((512, 64),),
    dtypes=(torch.bfloat16,),
    latent_kv_dtypes=(FP8,),
    # Pages tile the kernel's 128 keys; the copy engine cannot fetch single rows.
    page_sizes=(2, 4, 8, 16, 32, 64, 128),
)


class CuteDslMlaBackend(TrtllmFamilyBackend):
    """The `cutedsl_mla` backend.

    Verify needs nothing of enable_dcp (FlashInfer 0.6.17): a window's queries go as heads of one.
    """

    name = "cutedsl_mla"
    limits = LIMITS
    kernel = "cute-dsl"
    lse_base = LseBase.E

    def workspace_bytes(
        self, batch_size: int, num_heads: int, rank: int, device: torch.device
    ) -> int:
        """See split_workspace."""
        return split_workspace_bytes(batch_size, num_heads, rank, device)
