"""RMSNorm's fused form on a GPU: against float64, and the same bits whatever batch a row is in."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kvbraid.model.rms_norm import rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]

EPS = 1e-6
HEADS = 4
ERRORS = {torch.float32: 5e-7, torch.bfloat16: 9e-3}


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("size", [64, 96, 576, 4096])
@pytest.mark.parametrize("has_heads", [False, True], ids=["one_weight", "weight_a_head"])
def test_norm_is_that_of_float64_in_any_batch(
    dtype: torch.dtype, size: int, has_heads: bool
) -> None:
    """Also of columns of a wider row, as a latent is."""
    generator = torch.Generator("cuda").manual_seed(size)
    shape = (HEADS, size) if has_heads else (size,)
    weight = torch.randn(shape, generator=generator, device="cuda").to(dtype).float()
    wider = torch.randn(65, HEADS, size + 16, generator=generator, device="cuda").to(dtype)
    x = wider[..., :size]
    norm = rms_norm(weight, EPS, dtype)
    found = norm.forward(x)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert ((found.double() - expected).abs() <= ERRORS[dtype] * expected.abs() + 1e-9).all()
    for first, end in ((0, 1), (64, 65), (3, 11)):
        assert torch.equal(norm.forward(x[first:end]), found[first:end])


def test_one_launch_computes_it() -> None:
    """With a weight of another dtype torch composes it of eight."""
    x = torch.randn(8, 576, device="cuda").bfloat16()
    norm = rms_norm(torch.ones(576, device="cuda"), EPS, torch.bfloat16)
    norm.forward(x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        norm.forward(x)
        torch.cuda.synchronize()
    launched = [event for event in seen.events() if event.device_type.name == "CUDA"]
    assert len(launched) == 1, [event.name for event in launched]
