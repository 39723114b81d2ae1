"""What the torch backend alone promises: natural-log LSE, empties, no copy where none is needed."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention import reference
from attention.backends.dense import attend, attend_by_matmul
from attention.backends.torch_backend import TorchBackend
from attention.interface import DecodeBatch, GQACache, MLACache
from attention.layout import StripeLayout
from attention.rows import decode_rows

SCALE = 0.4
KV_INDEX = (0, 0, 1, 1)


def plan(lens, table, rank=0, dcp_size=1, window=1, backend=None, value_width=8):
    stripe = StripeLayout(dcp_size, rank, 4)
    batch = DecodeBatch(torch.tensor(lens, dtype=torch.int32), table, window)
    return (backend or TorchBackend()).plan_decode(
        decode_rows(batch, stripe),
        kv_index=KV_INDEX,
        scale=SCALE,
        value_width=value_width,
        device=torch.device("cpu"),
    )


def expected(q, keys, values):
    return reference.attend(
        q,
        keys,
        values,
        scale=SCALE,
        kv_index=KV_INDEX,
        visible=torch.ones(len(q), len(keys), dtype=torch.bool),
    )


@pytest.mark.parametrize("dcp_size", [1, 2, 3])
def test_lse_is_natural_and_of_the_local_keys_bugs_4_and_5(stripe_rows, dcp_size):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 14, 2, 8)
    q = torch.randn(1, 4, 8)
    pools, table = stripe_rows([[keys], [values]], dcp_size=dcp_size, page_size=4)
    for rank in range(dcp_size):
        out, lse = plan([14], table, rank, dcp_size).gqa(q, GQACache(*pools[rank]), None, None)
        oracle = expected(q, keys[rank::dcp_size], values[rank::dcp_size])
        torch.testing.assert_close(out.double(), oracle.out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse.double(), oracle.lse, rtol=1e-5, atol=1e-5)
        assert lse.dtype == torch.float32


@pytest.mark.parametrize("lens", [(0,), (1, 0), (0, 9), (3, 1)])
@pytest.mark.parametrize("window", [1, 2])
def test_empty_stripes_give_zero_and_minus_infinity(stripe_rows, lens, window):
    """On rank 3 of 4 those of up to 3 committed tokens are empty, whatever the pool holds."""
    lens = [length and length + window - 1 for length in lens]
    lens = [0 if 0 < length < window else length for length in lens]
    rows = [torch.randn(length, 2, 8) for length in lens]
    pools, table = stripe_rows([rows, rows], dcp_size=4, page_size=4)
    q = torch.randn(len(lens) * window, 4, 8)
    in_hand = torch.full((len(lens) * window, 2, 8), float("nan"))
    out, lse = plan(lens, table, 3, 4, window).gqa(q, GQACache(*pools[3]), in_hand, in_hand)
    is_empty = torch.tensor([n - (window if window > 1 else 0) < 4 for n in lens])
    is_empty = is_empty.repeat_interleave(window)
    assert (out[is_empty] == 0).all()
    assert (lse[is_empty] == float("-inf")).all()
    assert out.isfinite().all()
    assert lse[~is_empty].isfinite().all()


class _Operators(TorchDispatchMode):
    """Names of the operators that ran and bytes of the largest tensor that one allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for tensor in returned if isinstance(returned, tuple) else [returned]:
            if tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.nbytes)
        return returned


def test_one_contiguous_run_is_read_in_place(stripe_rows):
    rows = [torch.randn(400, 2, 8)]
    pools, table = stripe_rows([rows, rows], dcp_size=1, page_size=4, shuffle_pages=False)
    kernel, q = plan([400], table), torch.randn(1, 4, 8)
    with _Operators() as operators:
        kernel.gqa(q, GQACache(*pools[0]), None, None)
    assert "index_select" not in operators.names
    assert operators.largest <= q.nbytes


def test_scattered_pages_are_gathered_once_per_cache_tensor(stripe_rows):
    rows = [torch.randn(40, 2, 8), torch.randn(31, 2, 8)]
    pools, table = stripe_rows([rows, rows], dcp_size=1, page_size=4)
    kernel = plan([40, 31], table, value_width=12)
    with _Operators() as operators:
        kernel.gqa(torch.randn(2, 4, 8), GQACache(*pools[0]), None, None)
    assert operators.names.count("index_select") == 2
    with _Operators() as operators:
        kernel.mla(torch.randn(2, 4, 16), MLACache(pools[0][0].flatten(2)), None)
    assert operators.names.count("index_select") == 1


@pytest.mark.parametrize("masked", [False, True])
def test_matmul_and_fused_attention_agree(masked):
    """Devices without the fused CPU kernel take the other path."""
    torch.manual_seed(1)
    q, key, value = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    bias = torch.zeros(2, 1, 1, 9)
    if masked:
        bias[0, ..., 4:] = float("-inf")
    fused = attend(q, key, value, bias if masked else None, SCALE)
    plain = attend_by_matmul(q, key, value, bias if masked else None, SCALE)
    torch.testing.assert_close(plain.out, fused.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(plain.lse, fused.lse, rtol=1e-5, atol=1e-6)
    assert plain.lse.dtype == torch.float32


def test_verify_without_in_hand_rows_is_refused(stripe_rows):
    rows = [torch.randn(9, 2, 8)]
    pools, table = stripe_rows([rows, rows], dcp_size=1, page_size=4)
    with pytest.raises(ValueError, match="in-hand rows"):
        plan([9], table, window=2).gqa(torch.randn(2, 4, 8), GQACache(*pools[0]), None, None)


@pytest.mark.parametrize("pages", [[5, 6, 7], [5, 7, 6]])
def test_pages_outside_the_pool_are_an_error_not_a_shorter_answer(pages):
    pool = torch.randn(7, 4, 2, 8)
    table = torch.tensor([pages], dtype=torch.int32)
    with pytest.raises((RuntimeError, IndexError)):
        plan([12], table).gqa(torch.randn(1, 4, 8), GQACache(pool, pool), None, None)


def test_scratch_made_in_inference_mode_serves_later_steps(stripe_rows):
    rows = [torch.randn(9, 2, 8), torch.randn(7, 2, 8)]
    pools, table = stripe_rows([rows, rows], dcp_size=1, page_size=4)
    backend, q = TorchBackend(), torch.randn(2, 4, 8)
    with torch.inference_mode():
        warm_up, _ = plan([9, 7], table, backend=backend).gqa(q, GQACache(*pools[0]), None, None)
    later, _ = plan([9, 7], table, backend=backend).gqa(q, GQACache(*pools[0]), None, None)
    assert torch.equal(warm_up, later)
