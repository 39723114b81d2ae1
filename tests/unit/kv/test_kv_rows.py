"""Rows on their way into a pool on CPU: scales, rotation, refilled plans, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attention.interface import GQACache, MLACache
from attention.kv_rows import Rotation
from attention.layout import StripeLayout
from kvbraid.kv.page_pool import KvSpec, StripedPagePool
from kvbraid.kv.slots import LogicalSlots

FP8 = torch.float8_e4m3fn


def poisoned(spec: KvSpec, *, size: int = 1, rank: int = 0) -> StripedPagePool:
    pool = StripedPagePool(spec, 4, StripeLayout(size, rank, 4), "cpu")
    pool.fill_nan()
    return pool


def logical(*ids: int) -> LogicalSlots:
    return LogicalSlots(np.array(ids, dtype=np.int64))


def rotation(*positions: int, pairs: int, interleaved: bool = False) -> Rotation:
    """A quarter turn a position: (a, b) -> (-b, a) at position 1."""
    angles = torch.arange(8)[:, None] * torch.pi / 2 * torch.ones(pairs)
    return Rotation(torch.tensor(positions), angles.cos(), angles.sin(), interleaved)


def test_each_row_of_a_per_token_pool_has_a_scale_of_its_own() -> None:
    pool = poisoned(KvSpec("gqa", 2, 2, 4, 4, FP8, "per_token"), size=2, rank=1)
    key = torch.randn(3, 2, 4) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    value = torch.zeros(3, 2, 4)
    key[1] = value[1] = float("nan")
    pool.write(1, pool.write_plan(logical(9, 12, 13)), key, value)
    cache = pool.layer(1)
    assert isinstance(cache, GQACache)
    assert cache.key_scale is not None
    assert cache.value_scale is not None
    assert cache.key_scale.shape == cache.value_scale.shape == (4, 2, 4)
    for token, row in ((0, 0), (2, 2)):
        scale = key[token].abs().amax(-1) / 448
        torch.testing.assert_close(cache.key_scale[1, :, row], scale)
        stored = cache.key[1, row].float() * cache.key_scale[1, :, row][:, None]
        torch.testing.assert_close(stored, key[token], rtol=2**-4, atol=float(scale.max()) * 2**-10)
        assert cache.value[1, row].float().count_nonzero() == 0
    assert cache.key_scale.isfinite().sum() == cache.value_scale.isfinite().sum() == 4
    assert pool.count_finite_rows() == 4


def test_a_latent_has_one_scale_for_latent_and_rope_key() -> None:
    pool = poisoned(KvSpec("mla", 1, 1, 6, 0, FP8, "per_token"))
    latent = torch.tensor([[1.0, 2.0, -3.0, 0.5]])
    pool.write(0, pool.write_plan(logical(5)), latent, torch.tensor([[-56.0, 7.0]]))
    cache = pool.layer(0)
    assert isinstance(cache, MLACache)
    assert cache.host_scale is None
    assert cache.scale is not None
    assert cache.scale.shape == (4, 4)
    assert cache.scale[1, 1] == 0.125
    assert (cache.latent[1, 1].float() * 0.125).tolist() == [1.0, 2.0, -3.0, 0.5, -56.0, 7.0]


def test_per_tensor_scales_are_given_a_layer_and_large_numbers_saturate() -> None:
    pool = poisoned(KvSpec("gqa", 2, 1, 2, 2, FP8, "per_tensor"))
    pool.set_scales(1, 0.5, 4.0)
    rows = torch.tensor([[[3.0, -1000.0]]])
    for layer in range(2):
        pool.write(layer, pool.write_plan(logical(5)), rows, rows)
    first, second = pool.layer(0), pool.layer(1)
    assert isinstance(first, GQACache)
    assert isinstance(second, GQACache)
    assert [float(scale) for scale in (*first[2:4], *second[2:4]) if scale is not None] == [
        *(1.0, 1.0),
        *(0.5, 4.0),
    ]
    assert (first.host_scales, second.host_scales) == ((1.0, 1.0), (0.5, 4.0))
    assert first.key[1, 1, 0].tolist() == [3.0, -448.0]
    assert second.key[1, 1, 0].tolist() == [6.0, -448.0]
    assert second.value[1, 1, 0].tolist() == [0.75, -256.0]


def test_a_scale_is_the_same_number_on_the_host() -> None:
    """0.1 is none that float32 can hold."""
    pool = poisoned(KvSpec("mla", 2, 1, 6, 0, FP8, "per_tensor"))
    pool.set_scales(1, 0.1)
    unset, cache = pool.layer(0), pool.layer(1)
    assert isinstance(unset, MLACache)
    assert isinstance(cache, MLACache)
    assert cache.scale is not None
    assert (unset.host_scale, cache.host_scale) == (1.0, float(cache.scale))


def test_bytes_count_the_scales() -> None:
    rows = 3 * 4 * 4 * 2 * 8
    scales = 2 * 3 * 4 * 4 * 2 * 4
    assert poisoned(KvSpec("gqa", 3, 2, 4, 4, FP8, "per_token")).num_bytes == rows + scales
    assert poisoned(KvSpec("gqa", 3, 2, 4, 4, FP8, "per_tensor")).num_bytes == rows + 2 * 3 * 4


def test_rows_of_a_per_token_pool_are_not_moved() -> None:
    pool = poisoned(KvSpec("mla", 1, 1, 6, 0, FP8, "per_token"))
    with pytest.raises(ValueError, match="a row does not carry its scale"):
        pool.gather(logical(4), range(1), range(1))
    with pytest.raises(ValueError, match="a row does not carry its scale"):
        pool.scatter(logical(4), range(1), range(1), torch.zeros(1, 1, 1, 6).to(FP8))


@pytest.mark.parametrize(("dtype", "mode"), [(torch.bfloat16, "per_token"), (FP8, "per_head")])
def test_impossible_scale_modes_are_refused(dtype: torch.dtype, mode: str) -> None:
    with pytest.raises(ValueError, match=f"scale_mode '{mode}'"):
        KvSpec("mla", 1, 1, 6, 0, dtype, mode)


@pytest.mark.parametrize(
    ("mode", "scales"),
    [("per_token", (1.0, 1.0)), ("per_tensor", (1.0,)), ("per_tensor", (0.0, float("nan")))],
)
def test_impossible_scales_are_refused(mode: str, scales: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="scales"):
        poisoned(KvSpec("gqa", 1, 1, 2, 2, FP8, mode)).set_scales(0, *scales)


def test_a_refilled_plan_writes_the_new_slots_and_pads_into_the_sink() -> None:
    pool = poisoned(KvSpec("mla", 1, 1, 2, 0, torch.float32))
    plan = pool.write_plan(logical(4, 5, 6))
    assert pool.write_plan(logical(9), into=plan) is plan
    pool.write(0, plan, torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert pool.layer(0)[0][2, 1].tolist() == [1.0, 2.0]
    assert pool.count_finite_rows() == 2
    assert pool.count_finite_rows(logical(0, 9)) == 2
    with pytest.raises(ValueError, match="places for 3 tokens, got 4"):
        pool.write_plan(logical(4, 5, 6, 7), into=plan)


@pytest.mark.parametrize(
    ("interleaved", "expected"),
    [(False, [-3.0, -4.0, 1.0, 2.0, 5.0]), (True, [-2.0, 1.0, -4.0, 3.0, 5.0])],
)
def test_keys_are_rotated_as_they_are_written(interleaved: bool, expected: list[float]) -> None:
    """The first four numbers by a quarter turn; the fifth, and the values, stay."""
    pool = poisoned(KvSpec("gqa", 1, 1, 5, 5, torch.float32), size=2, rank=1)
    rows = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).expand(2, 1, 5)
    turn = rotation(7, 1, pairs=2, interleaved=interleaved)
    pool.write(0, pool.write_plan(logical(8, 9)), rows, rows, rotation=turn)
    cache = pool.layer(0)
    torch.testing.assert_close(cache[0][1, 0, 0], torch.tensor(expected))
    assert torch.equal(cache[1][1, 0, 0], rows[1, 0])  # type: ignore[index]
    assert pool.count_finite_rows() == 1


def test_a_rope_key_is_rotated_and_its_latent_is_not() -> None:
    pool = poisoned(KvSpec("mla", 1, 1, 4, 0, torch.float32))
    latent, rope_key = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
    pool.write(0, pool.write_plan(logical(6)), latent, rope_key, rotation=rotation(1, pairs=1))
    torch.testing.assert_close(pool.layer(0)[0][1, 2], torch.tensor([1.0, 2.0, -4.0, 3.0]))


def test_rows_that_do_not_fit_the_pool_are_refused() -> None:
    gqa = poisoned(KvSpec("gqa", 1, 2, 4, 6, torch.float32))
    mla = poisoned(KvSpec("mla", 1, 1, 6, 0, torch.float32))
    key, value = torch.zeros(1, 2, 4), torch.zeros(1, 2, 6)
    latent, rope_key = torch.zeros(1, 4), torch.zeros(1, 2)
    one = logical(4)
    with pytest.raises(ValueError, match="key and value rows must be"):
        gqa.write(0, gqa.write_plan(one), value, key)
    with pytest.raises(ValueError, match="must have 6 numbers together"):
        mla.write(0, mla.write_plan(one), latent, latent)
    with pytest.raises(ValueError, match="takes 1 or 2 tensors, got 3"):
        mla.write(0, mla.write_plan(one), latent, rope_key, rope_key)
    with pytest.raises(ValueError, match="apart from the latent"):
        mla.write(0, mla.write_plan(one), torch.zeros(1, 6), rotation=rotation(0, pairs=1))
    with pytest.raises(ValueError, match="wider than a key of 2"):
        mla.write(0, mla.write_plan(one), latent, rope_key, rotation=rotation(0, pairs=2))
    with pytest.raises(ValueError, match="needs 1 positions"):
        gqa.write(0, gqa.write_plan(one), key, value, rotation=rotation(0, 0, pairs=1))
