"""Folding query heads onto KV heads."""

from __future__ import annotations

import pytest
import torch

from attention.heads import FoldedHeads

MAPPINGS = [
    (0,),
    (0, 0, 0),
    (0, 0, 1, 1),
    (0, 0, 1, 1, 1),
    (0, 1, 1, 1, 2, 2),
    (1, 1, 2),
    (0, 1, 2),
]


@pytest.mark.parametrize("kv_index", MAPPINGS)
@pytest.mark.parametrize("window", [1, 3])
def test_unfold_undoes_fold(kv_index, window):
    heads = FoldedHeads(kv_index, torch.device("cpu"))
    q = torch.randn(2, window, len(kv_index), 5)
    assert torch.equal(heads.unfold(heads.fold(q), window), q)
    lse = heads.unfold(heads.fold(q)[..., 0], window)
    assert torch.equal(lse, q[..., 0])


@pytest.mark.parametrize("kv_index", MAPPINGS)
@pytest.mark.parametrize("window", [1, 3])
def test_a_folded_row_holds_only_queries_of_its_kv_head(kv_index, window):
    heads = FoldedHeads(kv_index, torch.device("cpu"))
    q = torch.tensor(kv_index).view(1, 1, -1, 1).expand(2, window, -1, 5)
    folded = heads.fold(q)
    assert folded.shape == (2, len(heads.kv_heads), window * heads.group_size, 5)
    for row, kv_head in enumerate(heads.kv_heads):
        assert (folded[:, row] == kv_head).all()


def test_no_heads_fold_to_nothing():
    heads = FoldedHeads((), torch.device("cpu"))
    assert (heads.num_q_heads, heads.kv_heads, heads.group_size) == (0, range(0), 0)
