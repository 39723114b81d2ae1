"""The oracle itself, against numbers computed by hand and against torch in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from attention import reference
from attention.interface import LatentExpansion


def scored(scores: list[float], values: list[float]):
    """One query whose scores are these: q = 1, key = score."""
    key = torch.tensor(scores).view(-1, 1, 1)
    value = torch.tensor(values).view(-1, 1, 1)
    visible = torch.ones(1, len(scores), dtype=torch.bool)
    return reference.attend(
        torch.ones(1, 1, 1), key, value, scale=1.0, kv_index=[0], visible=visible
    )


@pytest.mark.parametrize(
    ("scores", "values", "out", "lse"),
    [
        ([0, 1, 2, 3], [1, 2, 4, 8], 6.305193, math.log(sum(map(math.exp, range(4))))),
        ([0, 0, 0, 0, 2], [1, 2, 3, 4, 5], 4.121964, math.log(4 + math.exp(2))),
        ([0, 2], [1, 4], 3.642391, 2.126928),
    ],
)
def test_golden_vectors(scores, values, out, lse):
    result = scored([float(s) for s in scores], [float(v) for v in values])
    assert float(result.out) == pytest.approx(out, abs=1e-6)
    assert float(result.lse) == pytest.approx(lse, abs=1e-6)


def test_agrees_with_torch_for_causal_windows_and_shared_kv_heads():
    q, key = torch.randn(3, 4, 8).double(), torch.randn(7, 2, 8).double()
    value = torch.randn(7, 2, 8).double()
    visible = reference.window_visibility(3, 7)
    out, _ = reference.attend(q, key, value, scale=0.3, kv_index=[0, 0, 1, 1], visible=visible)
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1),
        key.repeat_interleave(2, dim=1).transpose(0, 1),
        value.repeat_interleave(2, dim=1).transpose(0, 1),
        attn_mask=visible,
        scale=0.3,
    )
    torch.testing.assert_close(out, expected.transpose(0, 1))


def test_window_visibility():
    assert reference.window_visibility(2, 4).tolist() == [[True] * 3 + [False], [True] * 4]
    assert reference.window_visibility(2, 4, "full").all()


def test_no_visible_key_gives_zero_and_minus_infinity():
    q = torch.ones(1, 1, 1)
    nothing = torch.zeros(1, 0, dtype=torch.bool)
    result = reference.attend(
        q, torch.ones(0, 1, 1), torch.ones(0, 1, 1), scale=1.0, kv_index=[0], visible=nothing
    )
    assert (float(result.out), float(result.lse)) == (0.0, float("-inf"))


def test_absorbed_and_expanded_latent_attention_are_the_same():
    rank, rope, nope, width, heads = 6, 2, 4, 3, 2
    q, latent = torch.randn(2, heads, nope + rope), torch.randn(5, rank + rope)
    expansion = LatentExpansion(torch.randn(heads, nope, rank), torch.randn(heads, rank, width))
    visible = reference.window_visibility(2, 5)
    expanded = reference.mla_expanded(q, latent, expansion, scale=0.5, visible=visible)
    q_latent = torch.einsum("whn,hnr->whr", q[..., :nope].double(), expansion.w_kc.double())
    absorbed = reference.mla_absorbed(
        q_latent, q[..., nope:].double(), latent, scale=0.5, visible=visible
    )
    value = torch.einsum("whr,hrv->whv", absorbed.out, expansion.w_vc.double())
    torch.testing.assert_close(value, expanded.out)
    torch.testing.assert_close(absorbed.lse, expanded.lse)


def test_a_full_copy_merged_as_a_shard_raises_the_lse_by_log_c():
    result = scored([0.0, 1.0, 2.0], [1.0, 2.0, 3.0])
    merged = reference.merge([result] * 4)
    torch.testing.assert_close(merged.out, result.out)
    assert float(merged.lse - result.lse) == pytest.approx(math.log(4))
