"""The trtllm-gen MLA decode kernel of FlashInfer. LSE of base 2."""

from __future__ import annotations

import torch

from attention.backends.kernel_limits import KernelLimits
from attention.backends.lse_base import LseBase
from attention.backends.per_tensor_scale import FP8
from attention.backends.trtllm_family import TrtllmFamilyBackend

_MIB = 1 << 20
# Counters that must be zero, at the front of the workspace: 8192 sequences x 256 heads x 4 bytes.
COUNTER_BYTES = 8 * _MIB
_PARTIAL_BYTES = 128 * _MIB

LIMITS = KernelLimits(
    vendor="nvidia",
    architectures=("sm100", "sm103"),
    modules={"flashinfer": "install flashinfer-python"},
    oldest={"flashinfer-python": (0, 6, 13)},
    latent_shapes=((512, 64), (256, 64)),
    dtypes=(torch.bfloat16,),
    latent_kv_dtypes=(FP8,),
    page_sizes=(32, 64),
    max_batch_size=8192,
)


class TrtllmMlaBackend(TrtllmFamilyBackend):
    """The `trtllm_mla` backend."""

    name = "trtllm_mla"
    limits = LIMITS
    kernel = "trtllm-gen"
    lse_base = LseBase.TWO

    def workspace_bytes(
        self, batch_size: int, num_heads: int, rank: int, device: torch.device
    ) -> int:
        """Counters, partial outputs and the LSE slab: 8 bytes x heads x batch x (queries of a
        sequence rounded up to 256) + 1 MiB (vLLM issue 50781)."""
        return COUNTER_BYTES + _PARTIAL_BYTES + 8 * num_heads * batch_size * 256 + _MIB
