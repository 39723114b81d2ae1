"""The target's side of a drafter: fc and its norms, in every published form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvbraid.model.loader import load_config
from kvbraid.model.safetensors_source import SafetensorsSource
from kvbraid.model.weight_reader import WeightReader
from kvbraid.speculative.drafter_config import AnyDrafterConfig
from kvbraid.speculative.tap_fusion import build_tap_fusion, load_tap_fusion
from tests.unit.speculative.drafters.random_drafters import (
    NUM_TAPS,
    TARGET_WIDTH,
    DictSource,
    dspark_config,
    eagle3_config,
    random_drafter,
)
from tests.unit.speculative.drafters.reference import Weights, fuse

ASSETS = Path(__file__).parents[2] / "assets"
FORMS = {
    "eagle3": eagle3_config(),
    "norm_before_fc": eagle3_config(norm_before_fc=True),
    "fc_norm": eagle3_config(fc_norm=True),
    "both_norms": eagle3_config(fc_norm=True, norm_before_fc=True),
    "dspark": dspark_config(),
}


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_fused_rows_equal_the_reference(config: AnyDrafterConfig, num_tokens: int) -> None:
    weights = random_drafter(config).weights
    reader = WeightReader(DictSource(weights), dtype=torch.float32, device=torch.device("cpu"))
    fusion = build_tap_fusion(config, reader)
    taps = 3 * torch.randn(num_tokens, NUM_TAPS, TARGET_WIDTH)
    kept = taps.clone()
    fused = fusion.fuse(taps)
    assert fused.shape == (num_tokens, fusion.fused_width)
    assert torch.equal(taps, kept), "the target's taps are left alone"
    torch.testing.assert_close(
        fused.double(), fuse(Weights(weights), config, taps), atol=1e-4, rtol=1e-4
    )


def test_taps_of_another_shape_are_refused() -> None:
    config = FORMS["eagle3"]
    reader = WeightReader(
        DictSource(random_drafter(config).weights), dtype=torch.float32, device=torch.device("cpu")
    )
    fusion = build_tap_fusion(config, reader)
    for shape in ((4, NUM_TAPS * TARGET_WIDTH), (4, NUM_TAPS, TARGET_WIDTH + 1), (4, 2, 20)):
        with pytest.raises(ValueError, match="must be"):
            fusion.fuse(torch.zeros(shape))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("eagle3", {"fc.weight"}), ("dspark", {"fc.weight", "hidden_norm.weight"})],
)
def test_a_target_reads_no_more_than_it_needs(
    kind: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = SafetensorsSource.read

    def spy(self: SafetensorsSource, name: str, bounds: tuple[range, ...]) -> torch.Tensor:
        read.append(name)
        return original(self, name, bounds)

    monkeypatch.setattr(SafetensorsSource, "read", spy)
    fusion = load_tap_fusion(ASSETS / f"tiny-mla-{kind}", load_config(ASSETS / "tiny-mla"))
    assert set(read) - {"d2t", "t2d"} == expected
    assert fusion.tap_layers == (0, 2, 4)
    assert fusion.fuse(torch.zeros(2, 3, 256)).shape == (2, 256)
