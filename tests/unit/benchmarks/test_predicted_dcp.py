"""The cost model of DCP on made-up measurements, and the committed predictions."""

from __future__ import annotations

import pytest

from benchmarks.dcp_cost_model import CostModel, Line, bytes_sent, interpolate
from benchmarks.predicted_dcp import margin_row, predict, row
from benchmarks.result_rows import RESULTS, ResultRows


def test_committed_predictions_follow_from_the_committed_measurements() -> None:
    """After new measurements: python -m benchmarks.predicted_dcp --json (the file)."""
    committed = ResultRows.load(RESULTS / "predicted_dcp.json")
    for fresh in predict(RESULTS):
        assert committed.row(fresh.case).ours == pytest.approx(fresh.ours), fresh.case
        assert committed.row(fresh.case).peer == pytest.approx(fresh.peer), fresh.case


@pytest.mark.parametrize(("x", "y"), [(0, 2.0), (1, 3.0), (1.5, 3.5), (2, 4.0), (4, 10.0), (6, 16)])
def test_interpolation_goes_on_beyond_the_ends(x: float, y: float) -> None:
    assert interpolate([(1, 3.0), (2, 4.0), (4, 10.0)], x) == pytest.approx(y)


def test_a_line_is_found_again() -> None:
    line = Line.fit([(x, 5.0 + 0.25 * x) for x in (1.0, 10.0, 100.0, 1000.0)])
    assert (line.latency_us, line.us_per_byte) == pytest.approx((5.0, 0.25))


def test_the_model_on_made_up_measurements() -> None:
    """4 ranks, 16 heads, batch 2: 3 pieces of 2 * 4 rows of 512 * 2 bytes."""
    assert bytes_sent(16, 2, 4) == 3 * 2 * 4 * 1024
    model = CostModel({16: [(0.0, 10.0), (1000.0, 110.0)]}, {"fused": Line(4.0, 1e-3)})
    assert model.tp_us(16, 2, 500, 4) == pytest.approx(110.0)
    for peers, latency in (("parallel", 4.0), ("turn", 12.0)):
        expected = 10 + 0.1 * 250 + latency + 1e-3 * 24576
        assert model.dcp_us("fused", 16, 2, 500, 4, peers) == pytest.approx(expected)
    with pytest.raises(ValueError, match="32 heads are more than the 16 measured"):
        model.local_us(32, 1000)


def test_the_margin_is_the_worst_of_dcp_and_never_flatters() -> None:
    checks = [
        row("check mla 16 heads, 1 x 128K, tp 2: predicted / measured", 1.0, 2.0, 0.5),
        row("check mla 16 heads, 1 x 128K, dcp 2 a2a: predicted / measured", 8.0, 10.0, 0.8),
        row("check mla 16 heads, 8 x 128K, dcp 2 a2a: predicted / measured", 2.0, 1.0, 2.0),
    ]
    assert margin_row(checks).ours == pytest.approx(1.25)
    assert margin_row(checks[2:]).ours == 1.0
