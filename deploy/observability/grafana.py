"""Our dashboards as Grafana's JSON, through the typed builders of grafana-foundation-sdk."""

from __future__ import annotations

import itertools

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableRefresh,
)

from deploy.observability.model import Dashboard, Panel

_SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
_HEIGHT = 8
_NUMBER_HEIGHT = 5


def to_json(page: Dashboard) -> str:
    """The file that Grafana imports, ending with a newline."""
    builder = (
        dashboard.Dashboard(page.title)
        .uid(f"kvbraid-{page.name}")
        .description(page.description)
        .tags(["kvbraid"])
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
    )
    for name in ("namespace", "instance"):
        builder.with_variable(_target_variable(name))
    builder.link(
        dashboard.DashboardLink("KVBraid").tags(["kvbraid"]).as_dropdown(True).include_vars(True)
    )
    ids = itertools.count(1)
    for row in page.rows:
        builder.with_row(dashboard.Row(row.title).id(next(ids)))
        for panel in row.panels:
            built = _number(panel) if panel.kind == "number" else _lines(panel)
            builder.with_panel(built.id(next(ids)))
    text: str = JSONEncoder(sort_keys=True, indent=2).encode(builder.build())
    return text + "\n"


def _target_variable(name: str) -> dashboard.QueryVariable:
    """A label of the scraped targets. All matches targets without that label, too."""
    return (
        dashboard.QueryVariable(name)
        .datasource(_SOURCE)
        .query(f"label_values(kvbraid_process_info, {name})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _targets(panel: Panel) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(65 + i))
        for i, query in enumerate(panel.queries)
    ]


def _number(panel: Panel) -> stat.Panel:
    built = (
        stat.Panel()
        .title(panel.title)
        .description(panel.question)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .span(panel.width)
        .height(_NUMBER_HEIGHT)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    for target in _targets(panel):
        built.with_target(target)
    return built


def _lines(panel: Panel) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    built = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.question)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .min(0)
        .span(panel.width)
        .height(_HEIGHT)
        .legend(legend)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .fill_opacity(30 if panel.kind == "stacked" else 5)
    )
    if panel.kind == "stacked":
        built.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for target in _targets(panel):
        built.with_target(target)
    return built
