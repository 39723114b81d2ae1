"""Packed products agree with plain ones for every number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvbraid.model.layers import Projection
from kvbraid.model.matrix_product import PackedProduct, PlainProduct, matrix_product

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    reason="torch without oneDNN",
)
ROW_COUNTS = [*range(20), 64, 513]


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x.double() @ weight.double().t()
    return product if bias is None else product + bias.double()


@needs_onednn
@pytest.mark.parametrize("num_outputs", [520, 2000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_number_of_rows_gives_the_product(num_outputs: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_outputs, 512, generator=generator)
    bias = torch.randn(num_outputs, generator=generator) if has_bias else None
    product = matrix_product([weight], bias)
    assert isinstance(product, PackedProduct)
    for num_rows in ROW_COUNTS:
        x = torch.randn(num_rows, 512, generator=generator)
        got = product.forward(x)
        assert got.shape == (num_rows, num_outputs)
        torch.testing.assert_close(got.double(), exact(x, weight, bias), atol=2e-4, rtol=0)


@needs_onednn
def test_neither_the_given_matrix_nor_its_rows_are_needed_afterwards() -> None:
    weight = torch.randn(512, 1024)
    x = torch.randn(3, 1024)
    expected = exact(x, weight, None)
    product = matrix_product([weight])
    weight.fill_(torch.nan)
    torch.testing.assert_close(product.forward(x).double(), expected, atol=2e-4, rtol=0)


@needs_onednn
def test_rows_that_are_no_neighbours_in_memory() -> None:
    weight = torch.randn(512, 512)
    wide = torch.randn(9, 1024)
    for x in (wide[:, 512:], wide[::3, :512], wide[:1, 512:]):
        got = matrix_product([weight]).forward(x)
        torch.testing.assert_close(got.double(), exact(x, weight, None), atol=2e-4, rtol=0)


@pytest.mark.parametrize("size", [16, 512])
def test_outputs_of_several_matrices_follow_one_another(size: int) -> None:
    parts = [torch.randn(size, 520), torch.randn(size // 2, 520)]
    biases = [torch.randn(len(part)) for part in parts]
    x = torch.randn(7, 520)
    expected = torch.cat(
        [exact(x, part, bias) for part, bias in zip(parts, biases, strict=True)], dim=1
    )
    got = Projection(parts, biases).forward(x)
    torch.testing.assert_close(got.double(), expected, atol=2e-4, rtol=0)


def test_small_matrices_and_other_dtypes_are_not_packed() -> None:
    assert isinstance(matrix_product([torch.randn(64, 64)]), PlainProduct)
    assert isinstance(matrix_product([torch.randn(512, 512, dtype=torch.bfloat16)]), PlainProduct)
