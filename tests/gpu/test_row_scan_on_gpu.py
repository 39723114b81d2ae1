"""The first maximum of a row on a GPU is the one that a CPU finds, ties and NaN included."""

from __future__ import annotations

import pytest
import torch

from kvbraid.engine.row_scan import first_maximum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]


@pytest.mark.parametrize("num_columns", [1, 2, 63, 65, 1000, 49152, 151936])
@pytest.mark.parametrize("num_rows", [1, 3, 64, 320])
def test_ties_go_to_the_first_column(num_rows: int, num_columns: int) -> None:
    generator = torch.Generator().manual_seed(num_rows * num_columns)
    scores = torch.randint(0, 3, (num_rows, num_columns), generator=generator).float()
    values, columns = first_maximum(scores.cuda())
    expected = (scores == scores.amax(dim=1, keepdim=True)).int().argmax(dim=1)
    assert columns.cpu().tolist() == expected.tolist()
    assert values.cpu().equal(scores.amax(dim=1))


def test_nan_is_the_maximum_and_nothing_but_minus_infinity_is_found_first() -> None:
    scores = torch.zeros(3, 5000)
    scores[0, 4321] = scores[0, 4400] = torch.nan
    scores[0, 17] = torch.inf
    scores[1] = -torch.inf
    values, columns = (found.cpu() for found in first_maximum(scores.cuda()))
    assert values.isnan().tolist() == [True, False, False]
    assert (values[1].item(), columns[1].item(), columns[2].item()) == (-torch.inf, 0, 0)
