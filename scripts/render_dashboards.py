"""Draws the dashboards from a live Prometheus, one PNG each, for the documentation.

Usage: `python scripts/render_dashboards.py --prometheus http://127.0.0.1:9090 --out docs/images --minutes 10`.

It is no Grafana: it draws the panels of deploy/grafana/dashboards/*.json at their places, with their titles, units,
legends and thresholds, from the same queries.
"""

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from scripts.dashboard_files import FOLDER, build_variables, fill_in, list_panels, load_dashboards
from scripts.panel_drawing import Line, Rectangle, draw_panel, draw_row_title
from scripts.prometheus_queries import Prometheus, Series

DOTS_PER_INCH = 100
PAGE, INK = "#F3F4F6", "#24292E"
NUM_COLUMNS, COLUMN_WIDTH, CELL_HEIGHT, GAP, HEADER_HEIGHT = 24, 70, 38, 8, 56
NUM_STEPS = 240
MAX_MINUTES = 60 * 24 * 365
STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#C9CED6",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 8.5,
    "grid.color": "#E7E9ED",
    "grid.linewidth": 0.8,
    "xtick.color": "#6B7280",
    "xtick.major.size": 0,
    "ytick.color": "#6B7280",
    "ytick.major.size": 0,
}


def render(dashboard: dict[str, Any], prometheus: Prometheus, span: tuple[float, float], window: str) -> Figure:
    """Draws a dashboard.

    Args:
        dashboard: as Grafana has it.
        prometheus: where its data comes from.
        span: start and end of the time shown, in seconds since 1970.
        window: what rates look back over, as `30s`.

    Returns:
        The picture.
    """
    num_rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    width, height = NUM_COLUMNS * COLUMN_WIDTH + 2 * GAP, num_rows * CELL_HEIGHT + HEADER_HEIGHT + GAP
    figure = Figure((width / DOTS_PER_INCH, height / DOTS_PER_INCH), dpi=DOTS_PER_INCH, facecolor=PAGE)
    FigureCanvasAgg(figure)
    figure.text(GAP * 1.5 / width, 1 - 28 / height, dashboard["title"], size=17, weight="bold", color=INK, va="center")
    variables = build_variables(dashboard, window=window, span=f"{span[1] - span[0]:.0f}s")
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            draw_row_title(figure, _find_place(panel, height), panel["title"])
    for panel in list_panels(dashboard):
        draw_panel(figure, _find_place(panel, height), panel, _ask(prometheus, panel, variables, span), span)
    return figure


def _find_place(panel: dict[str, Any], height: float) -> Rectangle:
    grid = panel["gridPos"]
    top = HEADER_HEIGHT + grid["y"] * CELL_HEIGHT
    return Rectangle(
        GAP + grid["x"] * COLUMN_WIDTH + GAP / 2,
        height - top - grid["h"] * CELL_HEIGHT + GAP / 2,
        grid["w"] * COLUMN_WIDTH - GAP,
        grid["h"] * CELL_HEIGHT - GAP,
    )


def _ask(
    prometheus: Prometheus, panel: dict[str, Any], variables: dict[str, str], span: tuple[float, float]
) -> list[Line]:
    start, end = span
    step = max(1.0, (end - start) / NUM_STEPS)
    return [
        Line(name_series(target["legendFormat"], series), series)
        for target in panel["targets"]
        for series in prometheus.query_range(fill_in(target["expr"], variables), start, end, step)
    ]


def name_series(legend: str, series: Series) -> str:
    """Puts a series' labels into its legend, as `{{pod}}` in the legend says."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: series.labels.get(found[1], ""), legend).strip()


def minutes(text: str) -> float:
    """Reads a time to show.

    Raises:
        ValueError: it is no number, or too short to draw.
    """
    number = float(text)
    if not 0.1 <= number <= MAX_MINUTES:
        raise ValueError(text)
    return number


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--minutes", type=minutes, default=15, help="the time shown, up to now")
    parser.add_argument("--window", default="1m", help="what rates look back over: at least four scrapes")
    parser.add_argument("--dashboards", type=Path, default=FOLDER, metavar="FOLDER")
    arguments = parser.parse_args()
    end = time.time()
    span = (end - arguments.minutes * 60, end)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for dashboard in load_dashboards(arguments.dashboards):
        with mpl.rc_context(STYLE):
            try:
                figure = render(dashboard, Prometheus(arguments.prometheus), span, arguments.window)
            except ValueError as error:
                sys.exit(f"error: {error}")
            name = dashboard["title"].lower().replace(" ", "-")
            path = arguments.out / f"dashboard-{name}.png"
            figure.savefig(path, facecolor=PAGE, pil_kwargs={"optimize": True})
        print(path)  # noqa: T201  What the command prints.


if __name__ == "__main__":
    main()
