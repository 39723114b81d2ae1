"""Packed products agree with plain ones for every number of rows and either memory order."""

from __future__ import annotations

import pytest
import torch

from kvbraid.model.few_rows_product import few_rows_product
from kvbraid.model.layers import Projection

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")


@needs_mkl
@pytest.mark.parametrize("num_outputs", [300, 2000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_number_of_rows_gives_the_product(num_outputs: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_outputs, 512, generator=generator)
    biases = [torch.randn(num_outputs, generator=generator)] if has_bias else []
    projection = Projection([weight], biases)
    for num_rows in range(1, 20):
        x = torch.randn(num_rows, 512, generator=generator)
        expected = x.double() @ weight.double().t()
        for bias in biases:
            expected += bias.double()
        torch.testing.assert_close(projection.forward(x).double(), expected, atol=2e-4, rtol=0)


@needs_mkl
def test_rows_do_not_see_the_padding() -> None:
    weight = torch.randn(512, 512)
    product = few_rows_product(weight)
    assert product is not None
    x = torch.randn(5, 512)
    padded = product.forward(torch.cat((x, torch.full((3, 512), 7.0))))
    assert torch.equal(product.forward(x), padded[:5])


def test_small_or_other_matrices_are_not_packed() -> None:
    assert few_rows_product(torch.randn(64, 64)) is None
    assert few_rows_product(torch.randn(512, 512, dtype=torch.bfloat16)) is None
