"""Fusion in pieces of few sizes gives every token its own row."""

from __future__ import annotations

import pytest
import torch

from kvbraid.speculative import padded_fusion
from kvbraid.speculative.padded_fusion import PADDED_SIZES, PaddedFusion
from tests.unit.speculative.mean_fusion import WIDTH, Mean


def taps(number: int) -> torch.Tensor:
    return torch.arange(float(number))[:, None, None].expand(-1, 2, WIDTH).clone()


@pytest.mark.parametrize("most", [24, 32])
def test_sizes_are_few_and_padding_reaches_no_row(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(padded_fusion, "_MOST_ROWS", most)
    fusion = Mean()
    padded = PaddedFusion(fusion)
    assert (padded.tap_layers, padded.fused_width) == ((0, 1), WIDTH)
    for number in (1, 2, 3, 5, 9, 17, most, most + 1, 2 * most + 3):
        assert padded.fuse(taps(number))[:, 0].tolist() == list(range(number))
    assert set(fusion.num_fused) == {1, 2, 4, 8, 16, most}


def test_every_size_is_known_before() -> None:
    fusion = Mean()
    for number in (1, 3, 100, 1500, 2048, 5000):
        PaddedFusion(fusion).fuse(taps(number))
    assert set(fusion.num_fused) <= set(PADDED_SIZES)
