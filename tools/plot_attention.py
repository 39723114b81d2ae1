"""Draws the plots of docs/attention.md from the result files.

python -m tools.plot_attention     (needs the extra `plots`, no torch and no GPU)

Everything that is drawn comes from the rows, bars included; a case that a benchmark no longer
writes raises KeyError. Equal results give equal files.
"""

from __future__ import annotations

import argparse
import io
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import BenchmarkRow
from benchmarks.result_rows import RESULTS, ResultRows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
COLOURS = ("#1b4f9c", "#2a9d8f", "#e9a23b", "#c8553d", "#7a5ba6")
EXCHANGE_COLOURS = {"fused": COLOURS[0], "a2a": COLOURS[2], "ag_rs": COLOURS[3]}

# What the plots read, by the names of the benchmarks' cases.
MLA = r"mla (?P<series>\d+ heads), (?P<group>\d+ x \d+K): / flashinfer fa3"
GQA = r"gqa (?P<series>\S+ heads of \d+), (?P<group>\d+ x \d+K): / flashinfer decode, .+"
VERIFY = r"mla 16 heads, 1 x 128K: verify (?P<window>\d+) / decode"
EXCHANGE = r"\d+ heads of (?P<width>\d+), batch \d+, \d+ splits, (?P<kib>\d+) KiB: {}"
LAYER = r"layer mla (?P<group>\d+ heads, \d+ x \d+K): one GPU / (?P<series>.+)"
PREDICTED = (
    r"predicted mla (?P<heads>\d+) heads, (?P<batch>\d+) x (?P<context>\d+)K, c (?P<size>\d+), "
    r"fused, peers in (?P<peers>parallel|turn): dcp against tp"
)

Grid = dict[str, dict[str, BenchmarkRow]]


def grid(rows: ResultRows, pattern: str) -> Grid:
    """series -> group -> row. Every series must have every group."""
    found: Grid = defaultdict(dict)
    for match, row in rows.matching(pattern):
        found[match["series"]][match["group"]] = row
    groups = {tuple(sorted(of_series)) for of_series in found.values()}
    if len(groups) > 1:
        raise KeyError(f"cases like {pattern!r} do not form a grid")
    return dict(found)


def exchange_times(rows: ResultRows) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """width -> exchange -> (KiB, us) of every batch and head count."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for match, row in rows.matching(EXCHANGE.format("fused / a2a")):
        for name, time_us in (("fused", row.ours), ("a2a", row.peer)):
            found[match["width"]][name].append((float(match["kib"]), time_us))
    for match, row in rows.matching(EXCHANGE.format("a2a / ag_rs")):
        found[match["width"]]["ag_rs"].append((float(match["kib"]), row.peer))
    return found


def bars(axes: Axes, series: Mapping[str, Mapping[str, BenchmarkRow]], one: str) -> None:
    """Grouped bars of the rows' ratios, each with its row's bar as a black line."""
    groups = list(next(iter(series.values())))
    width = 0.8 / len(series)
    for i, (name, of_series) in enumerate(series.items()):
        starts = [g - 0.4 + i * width for g in range(len(groups))]
        ratios = [of_series[group].ratio for group in groups]
        axes.bar(starts, ratios, 0.9 * width, align="edge", color=COLOURS[i], label=name)
        for start, group in zip(starts, groups, strict=True):
            bar = of_series[group].bar
            if bar is not None:
                axes.hlines(bar, start, start + 0.9 * width, color="black", linewidth=2)
    axes.hlines([], 0, 0, color="black", linewidth=2, label="bar")
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle=":", label=one)
    axes.set_xticks(range(len(groups)), groups)


def draw_ratios(figure: Figure, series: Grid, title: str) -> None:
    """Ours against FlashInfer over the batch shapes."""
    axes = figure.subplots()
    bars(axes, series, "FlashInfer")
    axes.set(title=title, xlabel="sequences x keys", ylabel="time / FlashInfer's (lower: faster)")
    figure.legend(ncols=6, fontsize=8, loc="outside lower center")


def draw_verify(figure: Figure, rows: ResultRows) -> None:
    """Cost of a verify window against decode."""
    axes = figure.subplots()
    found = [(match["window"], row) for match, row in rows.matching(VERIFY)]
    bars(axes, {"verify": dict(found)}, "decode")
    axes.set(
        title="Verify, MLA 16 heads, 1 x 128K",
        xlabel="queries of the window",
        ylabel="time / decode's (lower: cheaper)",
    )
    axes.legend(fontsize=8, loc="upper left")


def draw_exchanges(figure: Figure, rows: ResultRows) -> None:
    """Time of each exchange over the payload; lines join medians."""
    times = exchange_times(rows)
    panels = figure.subplots(1, len(times), sharey=True, squeeze=False)[0]
    for axes, (width, by_name) in zip(panels, times.items(), strict=True):
        for name, points in by_name.items():
            by_payload: dict[float, list[float]] = defaultdict(list)
            for kib, time_us in points:
                by_payload[kib].append(time_us)
            xs = sorted(by_payload)
            colour = EXCHANGE_COLOURS[name]
            axes.plot(*zip(*points, strict=True), ".", color=colour, markersize=4, alpha=0.6)
            medians = [statistics.median(by_payload[x]) for x in xs]
            axes.plot(xs, medians, color=colour, label=name)
        axes.set_xscale("log", base=2)
        axes.set(title=f"values {width} wide", xlabel="payload a rank, KiB", ylim=(0, None))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("us, splits to merged heads")
    panels[0].legend(fontsize=8, loc="upper left")


def draw_layers(figure: Figure, rows: ResultRows) -> None:
    """Speed-up of TP 2 and DCP 2 over one GPU with the same KV."""
    axes = figure.subplots()
    series = grid(rows, LAYER)
    bars(axes, series, "one GPU")
    groups = next(iter(series.values()))
    axes.set_xticks(range(len(groups)), [name.replace(", ", "\n") for name in groups])
    axes.set(title="A whole MLA decode layer on two H200", ylabel="speed-up (higher: faster)")
    figure.legend(ncols=5, fontsize=8, loc="outside lower center")


def draw_predictions(figure: Figure, rows: ResultRows) -> None:
    """Predicted DCP with `fused` against TP of as many ranks: the band between both bounds."""
    found = list(rows.matching(PREDICTED))
    heads, batches = (_sorted_numbers(found, name) for name in ("heads", "batch"))
    panels = figure.subplots(len(heads), len(batches), sharex=True, squeeze=False)
    for panel_row, num_heads in zip(panels, heads, strict=True):
        for axes, batch in zip(panel_row, batches, strict=True):
            of_panel = [x for x in found if x[0]["heads"] == num_heads and x[0]["batch"] == batch]
            _draw_bands(axes, of_panel)
            axes.set_title(f"{num_heads} heads, batch {batch}", fontsize=9)
        panel_row[0].set_ylabel("TP / DCP time")
    for axes in panels[-1]:
        axes.set_xlabel("context, K")
    panels[0][0].legend(fontsize=8, loc="upper left")
    figure.suptitle("PREDICTED, not measured: DCP c with fused against TP c")


def _draw_bands(axes: Axes, found: Sequence[tuple[re.Match[str], BenchmarkRow]]) -> None:
    for size, colour in zip(_sorted_numbers(found, "size"), COLOURS, strict=False):
        of_size = [x for x in found if x[0]["size"] == size]
        edges = {
            peers: [row.ratio for match, row in of_size if match["peers"] == peers]
            for peers in ("parallel", "turn")
        }
        contexts = [int(m["context"]) for m, _ in of_size if m["peers"] == "parallel"]
        axes.plot(contexts, edges["parallel"], color=colour, label=f"c = {size}", linewidth=1.2)
        axes.fill_between(contexts, edges["turn"], edges["parallel"], color=colour, alpha=0.25)
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [str(context) for context in contexts])
    axes.minorticks_off()
    axes.locator_params(axis="y", nbins=5)
    axes.tick_params(labelsize=8)


def _sorted_numbers(found: Sequence[tuple[re.Match[str], BenchmarkRow]], name: str) -> list[str]:
    return sorted({match[name] for match, _ in found}, key=int)


def save(path: Path, draw: Callable[[Figure], None], size: tuple[float, float]) -> None:
    """One SVG: text stays text, ids are seeded, no date, coordinates to a hundredth of a point."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as NewFigure

    style = {"svg.hashsalt": "kvbraid", "svg.fonttype": "none", "font.family": "sans-serif"}
    with mpl.rc_context(style):
        figure = NewFigure(figsize=size, layout="constrained")
        draw(figure)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    lines = re.sub(r"(\d+\.\d\d)\d+", r"\1", written.getvalue()).splitlines()
    path.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")


def plots(results: Path) -> dict[str, tuple[Callable[[Figure], None], tuple[float, float]]]:
    """File name -> (what draws it, inches)."""
    attention = ResultRows.load(results / "attention_h200.json")
    exchange = ResultRows.load(results / "exchange_h200.json")
    predicted = ResultRows.load(results / "predicted_dcp.json")
    mla, gqa = grid(attention, MLA), grid(attention, GQA)
    return {
        "attention_mla.svg": (lambda f: draw_ratios(f, mla, "MLA decode on H200, bf16"), (8, 3.6)),
        "attention_gqa.svg": (lambda f: draw_ratios(f, gqa, "GQA decode on H200, bf16"), (8, 3.2)),
        "attention_verify.svg": (lambda f: draw_verify(f, attention), (4.5, 3.2)),
        "exchange.svg": (lambda f: draw_exchanges(f, exchange), (8, 3.4)),
        "dcp_layer.svg": (lambda f: draw_layers(f, exchange), (8, 3.6)),
        "predicted_dcp.svg": (lambda f: draw_predictions(f, predicted), (8, 4.8)),
    }


def main() -> None:
    """Write every plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder to write to")
    options = parser.parse_args()
    options.images.mkdir(parents=True, exist_ok=True)
    for name, (draw, size) in plots(options.results).items():
        save(options.images / name, draw, size)
        print(f"{name}: {(options.images / name).stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
