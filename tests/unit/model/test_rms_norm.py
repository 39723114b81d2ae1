"""Both forms of RMSNorm against float64, for one weight and for one a head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvbraid.model.rms_norm import ComposedRMSNorm, FusedRMSNorm, rms_norm

EPS = 1e-2
ROWS, HEADS, SIZE = 5, 3, 48
FORMS: dict[str, Callable[[Tensor, torch.dtype], ComposedRMSNorm | FusedRMSNorm]] = {
    "composed": lambda weight, dtype: ComposedRMSNorm(weight, EPS),
    "fused": lambda weight, dtype: FusedRMSNorm(weight.to(dtype), EPS),
}


def norm64(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-7), (torch.bfloat16, 9e-3)])
@pytest.mark.parametrize("shape", [(SIZE,), (HEADS, SIZE)], ids=["one_weight", "weight_a_head"])
def test_norm_is_that_of_float64(
    form: str, dtype: torch.dtype, error: float, shape: tuple[int, ...]
) -> None:
    """Also of columns of a wider row, and where eps is most of what is divided by."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).float()
    wider = torch.randn(ROWS, HEADS, 2 * SIZE, generator=torch.Generator().manual_seed(2))
    wider[1] *= 1e-2
    x = wider.to(dtype)[..., SIZE:]
    found = FORMS[form](weight, dtype).forward(x)
    expected = norm64(x, weight)
    assert found.dtype == dtype
    assert found.shape == x.shape
    assert ((found.double() - expected).abs() <= error * expected.abs() + 1e-9).all()


def test_a_cpu_composes_it() -> None:
    assert isinstance(rms_norm(torch.ones(SIZE), EPS, torch.bfloat16), ComposedRMSNorm)
