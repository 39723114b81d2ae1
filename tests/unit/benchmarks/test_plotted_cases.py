"""Every case that the plots of docs/attention.md read is in the committed results."""

from __future__ import annotations

import itertools

import pytest

from benchmarks import predicted_dcp
from benchmarks.attention import GQA_HEADS, MLA_HEADS, SHAPES, VERIFY_BARS, Shape
from benchmarks.exchange import BATCHES, HEADS, LAYER_BATCHES, LAYER_HEADS, WIDTHS
from benchmarks.report import BenchmarkRow
from benchmarks.result_rows import RESULTS, ResultRows
from tools import plot_attention as plots

SHAPE_NAMES = {str(Shape(*shape)) for shape in SHAPES}


def rows_of(name: str) -> ResultRows:
    return ResultRows.load(RESULTS / f"{name}.json")


def test_decode_plots_have_every_head_count_and_shape() -> None:
    for pattern, series in (
        (plots.MLA, {f"{heads} heads" for heads in MLA_HEADS}),
        (plots.GQA, {f"{q}/{kv} heads of {dim}" for q, kv, dim in GQA_HEADS}),
    ):
        found = plots.grid(rows_of("attention_h200"), pattern)
        assert set(found) == series
        assert all(set(groups) == SHAPE_NAMES for groups in found.values())


def test_the_verify_plot_has_every_window() -> None:
    found = rows_of("attention_h200").matching(plots.VERIFY)
    assert {int(match["window"]) for match, _ in found} == set(VERIFY_BARS)


def test_the_exchange_plot_has_every_point() -> None:
    times = plots.exchange_times(rows_of("exchange_h200"))
    assert set(times) == {str(width) for width in WIDTHS}
    for by_name in times.values():
        assert set(by_name) == {"fused", "a2a", "ag_rs"}
        assert {len(points) for points in by_name.values()} == {len(HEADS) * len(BATCHES)}


def test_the_layer_plot_has_every_layer() -> None:
    found = plots.grid(rows_of("exchange_h200"), plots.LAYER)
    assert set(found) == {"tp 2", "dcp 2 fused", "dcp 2 a2a"}
    layers = {f"{h} heads, {Shape(b, 128 << 10)}" for h in LAYER_HEADS for b in LAYER_BATCHES}
    assert all(set(groups) == layers for groups in found.values())


def test_the_prediction_plot_has_every_point() -> None:
    found = list(rows_of("predicted_dcp").matching(plots.PREDICTED))
    names = ("heads", "batch", "context", "size", "peers")
    assert {tuple(match[name] for name in names) for match, _ in found} == {
        (str(heads), str(batch), str(context), str(size), peers)
        for heads, batch, context, size, peers in itertools.product(
            predicted_dcp.HEADS,
            predicted_dcp.BATCHES,
            predicted_dcp.CONTEXTS_K,
            predicted_dcp.SIZES,
            predicted_dcp.PEERS,
        )
    }


def test_a_renamed_case_fails() -> None:
    row = BenchmarkRow("mla 16 heads, 1 x 16K: / somebody else", 1.0, 1.0, 1.0, None, True)
    with pytest.raises(KeyError, match=r"x\.json has no case like"):
        plots.grid(ResultRows("x.json", [row]), plots.MLA)
    with pytest.raises(KeyError, match=r"x\.json has no case 'a'"):
        ResultRows("x.json", [row]).row("a")


def test_a_grid_with_a_hole_fails() -> None:
    cases = ("mla 16 heads, 1 x 16K", "mla 16 heads, 8 x 128K", "mla 32 heads, 1 x 16K")
    rows = [BenchmarkRow(f"{case}: / flashinfer fa3", 1.0, 1.0, 1.0, None, True) for case in cases]
    with pytest.raises(KeyError, match="do not form a grid"):
        plots.grid(ResultRows("x.json", rows), plots.MLA)
