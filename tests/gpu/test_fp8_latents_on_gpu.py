"""MLA decode over fp8 latents on a GPU, against float64 over the dequantised cache: cases that the
grid of test_triton_attention has few of."""

from __future__ import annotations

import pytest
import torch

from attention.backends.triton_backend import TritonBackend
from attention.interface import MLACache
from tests.gpu.test_triton_attention import (
    DEVICE,
    FACTORS,
    cache_result,
    check,
    make_problem,
    page_table,
    plain_case,
    rank_cache,
    rank_result,
)
from tools.quantised_rows import KINDS as KINDS_OF_SCALE
from tools.quantised_rows import ONE_SCALE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]


@pytest.mark.parametrize("kv", KINDS_OF_SCALE)
@pytest.mark.parametrize("lengths", FACTORS["lengths"])
@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 16},
        {"heads": 5, "dtype": torch.float16, "dcp_size": 3},
        {"heads": 1, "page": (128, 2), "dcp_size": 2},
        {"heads": 40},
        {"heads": 128, "dcp_size": 2},
    ],
    ids=["16 heads", "5 heads, 3 ranks", "1 head, 2 ranks", "40 heads", "128 heads, 2 ranks"],
)
def test_latents_in_fp8_without_a_window(kv: str, lengths: str, changes: dict[str, object]) -> None:
    """The Hopper kernel for them, of which the grid has few cases."""
    check(plain_case(**changes, kv=kv, lengths=lengths, needle=1))


@pytest.mark.parametrize("kv", KINDS_OF_SCALE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [1, 16, 32])
def test_many_latents_in_fp8(kv: str, dtype: torch.dtype, heads: int) -> None:
    """Two programs an SM, and partial results in the dtype of q."""
    check(plain_case(kv=kv, dtype=dtype, heads=heads, lengths="many"))


def test_latents_in_fp8_without_a_scale_have_a_scale_of_one() -> None:
    case = plain_case(kv="per tensor")
    problem = make_problem(case)
    cache = rank_cache(case, problem, page_table(case), 0)
    assert isinstance(cache, MLACache)
    # Scores of an ordinary size.
    problem.q *= ONE_SCALE
    none, one = (
        cache_result(case, problem, 0, TritonBackend(), cache._replace(scale=scale))
        for scale in (None, torch.ones(1, device=DEVICE))
    )
    assert bool(none.out.isfinite().all())
    torch.testing.assert_close(none, one)


@pytest.mark.parametrize("kv", KINDS_OF_SCALE)
@pytest.mark.parametrize("window", [(2, "causal"), (5, "full")])
def test_a_window_over_latents_in_fp8_is_served_by_another_kernel(
    kv: str, window: tuple[int, str]
) -> None:
    check(plain_case(kv=kv, window=window, heads=5))


@pytest.mark.parametrize("kv", KINDS_OF_SCALE)
def test_a_damaged_latent_in_fp8_is_not_hidden(kv: str) -> None:
    case = plain_case(kv=kv)
    problem = make_problem(case)
    problem.stored[0][0][4000] = float("nan")
    part = rank_result(case, problem, 0, TritonBackend())
    assert bool(part.out[0].isnan().all())
    assert bool(part.lse[0].isnan().all())
    assert bool(part.out[1].isfinite().all())
