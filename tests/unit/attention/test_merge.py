"""The exact merge: golden numbers, empty partials, damage, associativity, memory."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from attention import reference
from attention.interface import AttentionResult
from attention.merge import merge, merge_outputs

NO_KEYS = float("-inf")


def scalars(*partials: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) pairs as out [c, 1, 1, 1] and lse [c, 1, 1]."""
    out = torch.tensor([out for out, _ in partials]).view(-1, 1, 1, 1)
    return out, torch.tensor([lse for _, lse in partials]).view(-1, 1, 1)


def single_query(scores: list[float], values: list[float]) -> tuple[float, float]:
    scores_, values_ = torch.tensor(scores), torch.tensor(values)
    return float(scores_.softmax(0) @ values_), float(scores_.logsumexp(0))


def test_lse_is_natural_log_bug_1():
    """Z = [2, 8], second out 10: 8. As if base 2 it would be 7.2330, with exp on base 2 8.8080."""
    out, _ = merge(*scalars((0.0, math.log(2)), (10.0, math.log(8))))
    assert float(out) == pytest.approx(8.0, abs=1e-5)


@pytest.mark.parametrize("needle_rank", range(4))
def test_needle_on_each_stripe_in_turn_bug_1(needle_rank):
    """c = 4, L = 4096, scores 0 but one of ln 4096 with value 1: 0.5001, wrong bases give
    0.4034 and 0.6182."""
    stripes = [([0.0] * 1024, [0.0] * 1024) for _ in range(4)]
    scores, values = stripes[needle_rank]
    scores[500], values[500] = math.log(4096), 1.0
    merged = merge(*scalars(*(single_query(*stripe) for stripe in stripes)))
    assert float(merged.out) == pytest.approx(4096 / (4096 + 4095), abs=1e-4)
    assert float(merged.lse) == pytest.approx(math.log(4096 + 4095), abs=1e-5)


def test_golden_two_stripes():
    """s = [0, 1, 2, 3], v = [1, 2, 4, 8], c = 2."""
    first, second = single_query([0.0, 2.0], [1.0, 4.0]), single_query([1.0, 3.0], [2.0, 8.0])
    assert first == pytest.approx((3.642391, 2.126928), abs=1e-6)
    assert second == pytest.approx((7.284782, 3.126928), abs=1e-6)
    assert float(merge(*scalars(first, second)).out) == pytest.approx(6.305193, abs=1e-5)


def test_golden_four_stripes_of_five_tokens_bug_2():
    """s = [0, 0, 0, 0, 2], v = 1..5, c = 4: 4.12196; the wrong base gives 3.90299."""
    partials = [(4.523188, 2.126928), (2.0, 0.0), (3.0, 0.0), (4.0, 0.0)]
    assert single_query([0.0, 2.0], [1.0, 5.0]) == pytest.approx(partials[0], abs=1e-6)
    assert float(merge(*scalars(*partials)).out) == pytest.approx(4.121964, abs=1e-5)


def test_suffix_keeps_its_share_of_a_prefix_hit_bug_3():
    """Uniform scores, prefix 3072, suffix 64: the suffix weighs 0.0204, wrongly 0.0037."""
    out, _ = merge(*scalars((0.0, math.log(3072)), (1.0, math.log(64))))
    assert float(out) == pytest.approx(64 / 3136, abs=1e-6)


def test_one_token_leaves_all_other_stripes_empty_bug_8():
    empty = (0.0, NO_KEYS)
    out, lse = merge(*scalars((3.5, 1.25), empty, empty, empty))
    assert (float(out), float(lse)) == (3.5, 1.25)


@pytest.mark.parametrize("garbage", [0.0, 5.0, float("nan"), float("inf")])
def test_only_empty_partials_give_zero_bugs_8_10_11(garbage):
    out, lse = merge(*scalars((garbage, NO_KEYS), (garbage, NO_KEYS)))
    assert (float(out), float(lse)) == (0.0, NO_KEYS)


def test_padding_row_does_not_touch_its_neighbours_bug_11():
    """Lengths [5, 7, 3, 0]: row 3 is 0 and the maximum over the batch is finite."""
    out = torch.randn(2, 4, 3, 8)
    lse = torch.randn(2, 4, 3)
    out[:, 3], lse[:, 3] = float("nan"), NO_KEYS
    merged = merge(out, lse)
    assert (merged.out[3] == 0).all()
    assert merged.out.abs().amax().isfinite()
    expected = reference.merge([AttentionResult(out[r, :3], lse[r, :3]) for r in range(2)])
    torch.testing.assert_close(merged.out[:3].double(), expected.out, rtol=1e-5, atol=1e-6)


def test_weightless_garbage_is_not_multiplied():
    """An lse so low that its weight underflows to 0 must not let NaN through."""
    out, _ = merge(*scalars((2.0, 0.0), (float("nan"), -1000.0)))
    assert float(out) == 2.0


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_damaged_lse_is_not_taken_for_an_empty_stripe(damage):
    out, lse = scalars((2.0, 0.0), (3.0, damage), (1.0, NO_KEYS))
    assert merge_outputs(out, lse).isnan().all()


def test_equal_lses_average_and_a_dominant_one_wins():
    assert float(merge(*scalars((1.0, 2.0), (3.0, 2.0), (8.0, 2.0))).out) == pytest.approx(4.0)
    assert float(merge(*scalars((1.0, 0.0), (3.0, 200.0))).out) == 3.0


def test_a_single_partial_is_returned_bit_for_bit():
    out, lse = torch.randn(1, 6, 3, 8), torch.randn(1, 6, 3)
    merged = merge(out, lse)
    assert torch.equal(merged.out, out[0])
    assert torch.equal(merged.lse, lse[0])


@st.composite
def partials_with_grouping(draw):
    num_partials = draw(st.integers(2, 8))
    cuts = sorted(draw(st.sets(st.integers(1, num_partials - 1))))
    return num_partials, [0, *cuts, num_partials], draw(st.integers(0, 1000))


@given(partials_with_grouping())
def test_any_grouping_of_the_partials_gives_the_same(case):
    num_partials, bounds, seed = case
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(num_partials, 3, 2, 4, generator=generator)
    lse = 6 * torch.randn(num_partials, 3, 2, generator=generator)
    empty = torch.rand(lse.shape, generator=generator) < 0.3
    out.masked_fill_(empty[..., None], 0.0)
    lse.masked_fill_(empty, NO_KEYS)
    groups = [merge(out[a:b], lse[a:b]) for a, b in pairwise(bounds)]
    regrouped = merge(torch.stack([g.out for g in groups]), torch.stack([g.lse for g in groups]))
    at_once = merge(out, lse)
    torch.testing.assert_close(regrouped.out, at_once.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(regrouped.lse, at_once.lse, rtol=1e-5, atol=1e-5)
    oracle = reference.merge([AttentionResult(o, s) for o, s in zip(out, lse, strict=True)])
    torch.testing.assert_close(at_once.out.double(), oracle.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(at_once.lse.double(), oracle.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_partials_are_summed_in_float32(dtype):
    out, lse = torch.randn(8, 5, 3, 16).to(dtype), torch.randn(8, 5, 3)
    merged = merge(out, lse).out
    oracle = reference.merge([AttentionResult(o, s) for o, s in zip(out, lse, strict=True)])
    assert merged.dtype == dtype
    assert torch.equal(merged, oracle.out.to(dtype)) or torch.allclose(
        merged.double(), oracle.out, rtol=torch.finfo(dtype).eps, atol=1e-3
    )


class _LargestAllocations(TorchDispatchMode):
    """Bytes of every tensor that an operator returns in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for tensor in returned if isinstance(returned, (tuple, list)) else [returned]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in known:
                    self.sizes.append(storage.nbytes())
        return returned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_needs_no_memory_beyond_its_inputs_and_output_bug_6(dtype):
    """The public bug: a temporary as large as the partials. Here at most one is above 2 MiB, the
    output itself."""
    out = torch.randn(4, 4096, 16, 64).to(dtype)
    lse = torch.randn(4, 4096, 16)
    with _LargestAllocations() as allocations:
        merged = merge(out, lse)
    large = [size for size in allocations.sizes if size > 2 << 20]
    assert large == [merged.out.nbytes]
    oracle = reference.merge(
        [AttentionResult(o[-1:], s[-1:]) for o, s in zip(out, lse, strict=True)]
    )
    torch.testing.assert_close(merged.out[-1:].double(), oracle.out, rtol=1e-2, atol=1e-2)
