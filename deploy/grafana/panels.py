"""Panels and the frame of a dashboard, as all of Ringplan's dashboards have them."""

from collections.abc import Sequence
from typing import NamedTuple

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common, dashboard, units

DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "ringplan"
DO_MARK = "**If it looks wrong:**"
QUANTILES = (0.5, 0.95, 0.99)
GREEN, YELLOW, RED, BLUE = "green", "yellow", "red", "blue"
TOKENS_PER_SECOND = "suffix: tokens/s"


class Query(NamedTuple):
    """One query of a panel and what its series are called."""

    expr: str
    legend: str


class Limit(NamedTuple):
    """From which value on a figure has a colour."""

    value: float
    color: str


class Limits(NamedTuple):
    """The colours of a figure: one to begin with, others from a value on."""

    base: str
    steps: tuple[Limit, ...] = ()


def bad_from(yellow: float, red: float) -> Limits:
    """Returns the colours of a figure that ought to be small."""
    return Limits(GREEN, (Limit(yellow, YELLOW), Limit(red, RED)))


def good_from(yellow: float, green: float) -> Limits:
    """Returns the colours of a figure that ought to be large."""
    return Limits(RED, (Limit(yellow, YELLOW), Limit(green, GREEN)))


def describe(shows: str, remedy: str) -> str:
    """Returns a panel's description: what it shows, and what to do when it looks wrong."""
    return f"{shows}\n\n{DO_MARK} {remedy}"


def build_graph(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    width: int = 8,
    style: str = "line",
    maximum: float | None = None,
    limits: Limits | None = None,
) -> timeseries.Panel:
    """Builds a panel of lines over time.

    Args:
        title: its title.
        description: from `describe`.
        unit: Grafana's name of the unit.
        queries: what to draw.
        width: columns, of 24.
        style: `line`, `stacked`, `bars`, or `log` for a logarithmic axis.
        maximum: top of the axis.
        limits: drawn as lines.

    Returns:
        The panel.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(DATASOURCE)
        .height(8)
        .span(width)
        .line_width(1.5)
        .fill_opacity({"line": 8, "stacked": 35, "bars": 70, "log": 0}[style])
        .show_points(common.VisibilityMode.NEVER)
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
        .legend(
            common_builders.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
        )
    )
    if style == "log":
        panel.scale_distribution(common_builders.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10))
    else:
        panel.min(0)
    if style == "bars":
        panel.draw_style(common.GraphDrawStyle.BARS)
    if style in {"stacked", "bars"}:
        panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if maximum is not None:
        panel.max(maximum)
    if limits:
        panel.thresholds(_build_thresholds(limits))
        panel.thresholds_style(
            common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        )
    return panel.targets([_build_target(index, query) for index, query in enumerate(queries)])


def build_stat(
    title: str,
    description: str,
    unit: str,
    query: Query,
    limits: Limits,
    *,
    width: int = 4,
    words: dict[str, Limit] | None = None,
    empty: str = "no data",
) -> stat.Panel:
    """Builds a panel of one large figure, coloured by its limits.

    Args:
        title: its title.
        description: from `describe`.
        unit: Grafana's name of the unit.
        query: the figure.
        limits: its colours.
        width: columns, of 24.
        words: what to say in place of a value, as `{word: (value, colour)}`.
        empty: what to say where there is no value.

    Returns:
        The panel.
    """
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(DATASOURCE)
        .height(4)
        .span(width)
        .graph_mode(common.BigValueGraphMode.AREA)
        .color_mode(common.BigValueColorMode.BACKGROUND)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
        .thresholds(_build_thresholds(limits))
        .no_value(empty)
        .targets([_build_target(0, query)])
    )
    if words:
        panel.graph_mode(common.BigValueGraphMode.NONE)
        options = {
            f"{limit.value:g}": dashboard.ValueMappingResult(text=word, color=limit.color, index=index)
            for index, (word, limit) in enumerate(words.items())
        }
        panel.mappings([dashboard.ValueMap(options)])
    return panel


def build_names(title: str, description: str, query: Query, *, width: int, height: int = 4) -> stat.Panel:
    """Builds a panel that names series by their labels; their value, 1, is not shown.

    Args:
        title: its title.
        description: from `describe`.
        query: its legend is what is shown.
        width: columns, of 24.
        height: rows of the grid.

    Returns:
        The panel.
    """
    panel = build_stat(title, description, units.NoUnit, query, Limits(BLUE), width=width)
    return (
        panel.height(height)
        .text_mode(common.BigValueTextMode.NAME)
        .color_mode(common.BigValueColorMode.NONE)
        .graph_mode(common.BigValueGraphMode.NONE)
        .orientation(common.VizOrientation.HORIZONTAL)
        .text(common_builders.VizTextDisplayOptions().title_size(16))
    )


def _build_thresholds(limits: Limits) -> builders.ThresholdsConfig:
    # Grafana's first step has no value: it is the colour of all below the next.
    steps = [dashboard.Threshold(None, limits.base), *(dashboard.Threshold(*limit) for limit in limits.steps)]
    return builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)


def _build_target(index: int, query: Query) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .expr(query.expr)
        .legend_format(query.legend)
        .ref_id(chr(ord("A") + index))
        .datasource(DATASOURCE)
        .range()
    )


class Row(NamedTuple):
    """A row of a dashboard."""

    title: str
    panels: Sequence[timeseries.Panel | stat.Panel]


def build_dashboard(title: str, uid: str, description: str, rows: Sequence[Row]) -> dashboard.Dashboard:
    """Builds a dashboard with the variables that all have.

    Args:
        title: its title.
        uid: its id in Grafana's addresses; never changed, since links lead there.
        description: what it is for.
        rows: from top to bottom.

    Returns:
        The dashboard.
    """
    board = (
        builders.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .editable()
        .timezone("browser")
        .refresh("30s")
        .time("now-1h", "now")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .variables(_build_variables())
        .links(
            [
                builders.DashboardLink("Ringplan")
                .type(dashboard.DashboardLinkType.DASHBOARDS)
                .tags([TAG])
                .as_dropdown(False)
                .include_vars(True)
                .keep_time(True)
            ]
        )
    )
    panel_id = 0
    for row in rows:
        panel_id += 1
        board.with_row(builders.Row(row.title).id(panel_id))
        for panel in row.panels:
            panel_id += 1
            board.with_panel(panel.id(panel_id))
    return board.build()


def _build_variables() -> list[Builder[dashboard.VariableModel]]:
    processes = '__name__=~"ringplan_(sessions|requests_running)"'
    in_namespace = 'namespace=~"$namespace"'
    in_pod = 'pod=~"$pod"'
    return [
        builders.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        _build_query_variable("namespace", "Namespace", processes),
        _build_query_variable("pod", "Pod", processes, in_namespace),
        _build_query_variable("session", "Session", '__name__="ringplan_ring_depth"', in_namespace, in_pod),
    ]


def _build_query_variable(name: str, title: str, *matchers: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(name)
        .label(title)
        .query(f"label_values({{{','.join(matchers)}}}, {name})")
        .datasource(DATASOURCE)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(dashboard.VariableOption(selected=True, text="All", value="$__all"))
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.NATURAL_ASC)
    )
