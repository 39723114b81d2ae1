"""Vendors' kernels over fp8 pools: one scale, as a number that nobody reads from a device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention.backends.flashinfer_backend import FlashInferBackend
from attention.backends.per_tensor_scale import head_scales, latent_scale, query_as
from attention.interface import GQACache, MLACache
from tests.unit.attention.vendor_doubles.adapters import ADAPTERS
from tests.unit.attention.vendor_doubles.striped_case import (
    Problem,
    Step,
    assert_step_is_exact,
    attend_on_rank,
)

LATENT = ("trtllm_mla", "cutedsl_mla", "tokenspeed_mla", "aiter")


def recorded(scale: Tensor) -> tuple[Tensor, list[object]]:
    """`scale`, and what is done with it from now on: nothing, or its device is waited for."""
    calls: list[object] = []

    class RecordedScale(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            calls.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    return scale.as_subclass(RecordedScale), calls


@pytest.mark.parametrize("name", LATENT)
def test_fp8_scales_reach_the_kernel(name, stripe_rows, monkeypatch):
    """Against float64 over the dequantised pool; the NVIDIA kernels also quantise the query."""
    adapter = ADAPTERS[name]
    adapter.install(monkeypatch, None)
    step = Step((70, 3, 0), heads=8, page_size=64, dcp_size=2, kv_scale=0.03)
    problem = Problem(step, stripe_rows)
    q = problem.q if name == "aiter" else query_as(problem.q, torch.float8_e4m3fn)
    assert_step_is_exact(problem, adapter.make(), q=q)


@pytest.mark.parametrize("name", ["trtllm_mla", "tokenspeed_mla"])
def test_a_window_over_an_fp8_pool(name, stripe_rows, monkeypatch):
    adapter = ADAPTERS[name]
    adapter.install(monkeypatch, None)
    step = Step((70, 3, 0), heads=8, page_size=64, dcp_size=2, kv_scale=2**-5, window=3)
    problem = Problem(step, stripe_rows)
    problem.q = query_as(problem.q, torch.float8_e4m3fn).to(torch.bfloat16)
    assert_step_is_exact(problem, adapter.make())


def test_flashinfer_grouped_heads_over_an_fp8_pool(stripe_rows, monkeypatch):
    ADAPTERS["flashinfer"].install(monkeypatch, None)
    step = Step((70, 3, 0, None), heads=8, kv_index=(0,) * 4 + (1,) * 4, kv_scale=0.03)
    assert_step_is_exact(Problem(step, stripe_rows), FlashInferBackend())


@pytest.mark.parametrize(("name", "kv_index"), [*((n, None) for n in LATENT), ("flashinfer", (0,))])
def test_no_layer_of_any_step_touches_the_scale_on_the_device(
    name, kv_index, stripe_rows, monkeypatch
):
    """As a pool gives caches: new views each time, and in the device's memory."""
    adapter = ADAPTERS[name]
    adapter.install(monkeypatch, None)
    step = Step((70, 3), heads=1, kv_index=kv_index, page_size=64, dcp_size=1, kv_scale=2**-5)
    problem = Problem(step, stripe_rows)
    scale, calls = recorded(torch.tensor([2**-5]))
    given = problem.cache(0)
    names = ("scale",) if kv_index is None else ("key_scale", "value_scale")
    problem.cache = lambda rank: given._replace(**dict.fromkeys(names, scale))
    backend = adapter.make()
    for _ in range(2):
        attend_on_rank(problem, backend, 0, layers=3)
    assert calls == []
    float(scale)
    assert calls, "a read would have been recorded"


def test_scales_are_one_number_and_given_on_the_host():
    latents, heads = torch.zeros(4, 16, 8), torch.zeros(4, 16, 1, 8)
    assert latent_scale(MLACache(latents)) == 1.0
    assert latent_scale(MLACache(latents, torch.ones(1), 0.5)) == 0.5
    assert head_scales(GQACache(heads, heads)) == (1.0, 1.0)
    assert head_scales(GQACache(heads, heads, torch.ones(1), torch.ones(1), (0.5, 2.0))) == (
        0.5,
        2.0,
    )
    a_token = torch.ones(4, 16)
    with pytest.raises(ValueError, match=r"shape \(4, 16\) and no host_scale; .* takes one number"):
        latent_scale(MLACache(latents, a_token))
    with pytest.raises(
        ValueError, match=r"shape \(4, 16\) and no host_scales; .* takes one number"
    ):
        head_scales(GQACache(heads, heads, a_token, a_token))


def test_queries_saturate_in_fp8():
    quantised = query_as(torch.tensor([1000.0, -1000.0, 1.0]), torch.float8_e4m3fn)
    assert quantised.float().tolist() == [448.0, -448.0, 1.0]
    q = torch.ones(1)
    assert query_as(q, torch.bfloat16) is q
