"""Draws one panel of a dashboard with matplotlib, much as Grafana would."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, MultipleLocator, NullLocator

from scripts.prometheus_queries import Series
from scripts.unit_text import write_figure

# Colours that people who see fewer of them can tell apart (Okabe and Ito's).
LINE_COLORS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#8C6D00",
    "#666666",
    "#332288",
    "#AA4499",
)
NAMED_COLORS = {"green": "#2E8B57", "yellow": "#D99A00", "red": "#D03B3B", "blue": "#3F72C4"}
PAPER, INK, FAINT = "#FFFFFF", "#24292E", "#8A8F98"
TITLE_HEIGHT, AXIS_HEIGHT, LEGEND_LINE_HEIGHT, MARGIN = 30, 22, 17, 12
LABEL_WIDTH = 78
# About what a letter of the legend's font takes.
LETTER_WIDTH, HANDLE_WIDTH = 6.0, 34


class Rectangle(NamedTuple):
    """Where something stands in the picture, in pixels from its lower left corner."""

    left: float
    bottom: float
    width: float
    height: float


class Line(NamedTuple):
    """One series of a panel and what it is called."""

    name: str
    series: Series


def draw_panel(
    figure: Figure, place: Rectangle, panel: dict[str, Any], lines: Sequence[Line], span: tuple[float, float]
) -> None:
    """Draws a panel.

    Args:
        figure: the picture.
        place: where in it.
        panel: as the dashboard has it.
        lines: its series.
        span: start and end of the time shown, in seconds since 1970.
    """
    _draw_box(figure, place, PAPER)
    if panel["type"] == "timeseries":
        _write_title(figure, place, panel["title"], INK)
        _draw_graph(figure, place, panel, lines, span)
    elif panel["options"].get("textMode") == "name":
        _write_title(figure, place, panel["title"], INK)
        _draw_names(figure, place, lines)
    else:
        _draw_figure(figure, place, panel, lines)


def draw_row_title(figure: Figure, place: Rectangle, title: str) -> None:
    """Writes the title of a row of panels."""
    _write(figure, place.left + 2, place.bottom + place.height / 2, title, size=12, weight="bold", va="center")


def _draw_graph(
    figure: Figure, place: Rectangle, panel: dict[str, Any], lines: Sequence[Line], span: tuple[float, float]
) -> None:
    num_columns, num_lines = _lay_out_legend(place, lines)
    below = AXIS_HEIGHT + num_lines * LEGEND_LINE_HEIGHT + MARGIN / 2
    axis = _add_axes(
        figure,
        Rectangle(
            place.left + LABEL_WIDTH,
            place.bottom + below,
            place.width - LABEL_WIDTH - MARGIN,
            place.height - below - TITLE_HEIGHT - 4,
        ),
    )
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults["custom"]
    _draw_lines(axis, lines, custom)
    if not any(np.isfinite(line.series.values).any() for line in lines):
        axis.text(0.5, 0.5, "no data in this time", transform=axis.transAxes, ha="center", va="center", color=FAINT)
        # Something that a logarithmic axis can show.
        axis.set_ylim(1e-5, 1)
    _set_scale(axis, defaults, custom)
    _draw_thresholds(axis, defaults, custom)
    _set_times(axis, span)
    if lines:
        axis.legend(
            loc="upper left",
            bbox_to_anchor=(
                -(LABEL_WIDTH - MARGIN) / (place.width - LABEL_WIDTH - MARGIN),
                -AXIS_HEIGHT / axis.bbox.height,
            ),
            ncols=num_columns,
            frameon=False,
            fontsize=8.5,
            handlelength=1.2,
            handletextpad=0.5,
            columnspacing=1.4,
            labelspacing=0.35,
            borderpad=0,
            borderaxespad=0.3,
        )


def _draw_lines(axis: Axes, lines: Sequence[Line], custom: dict[str, Any]) -> None:
    opacity = custom["fillOpacity"] / 100
    is_stacked = custom.get("stacking", {}).get("mode") == "normal"
    if is_stacked and lines:
        times = np.unique(np.concatenate([line.series.times for line in lines]))
        bottom = np.zeros(times.size)
    for index, line in enumerate(lines):
        color = LINE_COLORS[index % len(LINE_COLORS)]
        if not is_stacked:
            axis.plot(line.series.times, line.series.values, color=color, linewidth=1.5, label=line.name)
            axis.fill_between(line.series.times, line.series.values, color=color, alpha=opacity, linewidth=0)
            continue
        values = np.nan_to_num(np.interp(times, line.series.times, line.series.values, left=0, right=0))
        if custom.get("drawStyle") == "bars":
            width = float(np.median(np.diff(times))) if times.size > 1 else 1.0
            axis.bar(times, values, width, bottom, color=color, alpha=opacity, label=line.name)
        else:
            axis.fill_between(times, bottom, bottom + values, color=color, alpha=opacity, linewidth=0)
            # Where a series is 0 its edge would hide that of the one below.
            axis.plot(times, np.where(values > 0, bottom + values, np.nan), color=color, linewidth=1.2, label=line.name)
        bottom = bottom + values


def _set_scale(axis: Axes, defaults: dict[str, Any], custom: dict[str, Any]) -> None:
    if custom.get("scaleDistribution", {}).get("type") == "log":
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        steps = (1.0,) if high > 1000 * low else (1.0, 2.0, 5.0)
        axis.yaxis.set_major_locator(LogLocator(10, steps, numticks=8))
        axis.yaxis.set_minor_locator(NullLocator())
    else:
        axis.margins(y=0.08)
        low, high = axis.get_ylim()
        # A line that stays at 0 lies on the axis of a scale up to 1.
        high = defaults.get("max", high if axis.dataLim.ymax > 0 else 1)
        axis.set_ylim(defaults.get("min", low), high * (1.02 if "max" in defaults else 1))
        axis.yaxis.set_major_locator(_pick_locator(defaults["unit"], high))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: write_figure(value, defaults["unit"])))


def _pick_locator(unit: str, high: float) -> Locator:
    if unit == "bytes":
        # Steps that are round in the units of bytes.
        return MultipleLocator(2.0 ** math.ceil(math.log2(high / 6)))
    if unit == "s" and high > 60:
        return MultipleLocator(next(step for step in (15, 30, 60, 120, 300, 600, 1800, 3600, 1e9) if high / step <= 6))
    return MaxNLocator(5, integer=unit == "none")


def _draw_thresholds(axis: Axes, defaults: dict[str, Any], custom: dict[str, Any]) -> None:
    if custom.get("thresholdsStyle", {}).get("mode", "off") == "off":
        return
    _, top = axis.get_ylim()
    for step in defaults["thresholds"]["steps"]:
        if step["value"] is not None and step["value"] <= top:
            axis.axhline(step["value"], color=NAMED_COLORS[step["color"]], linestyle="--", linewidth=1)


def _set_times(axis: Axes, span: tuple[float, float]) -> None:
    start, end = span
    axis.set_xlim(start, end)
    num_ticks = max(axis.bbox.width / 70, 1)
    steps = (30, 60, 120, 300, 600, 1800, 3600, 7200, 43200, 86400)
    step = next((step for step in steps if (end - start) / step <= num_ticks), end - start)
    ticks = np.arange(math.ceil(start / step) * step, end, step)
    # Near the corner a time would run into the figures of the other axis.
    axis.set_xticks(ticks[ticks - start > (end - start) * 25 / axis.bbox.width])
    form = "%H:%M" if step >= 60 else "%H:%M:%S"
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: datetime.fromtimestamp(value, UTC).strftime(form)))


def _draw_figure(figure: Figure, place: Rectangle, panel: dict[str, Any], lines: Sequence[Line]) -> None:
    """Draws one large figure on the colour that it deserves, the past of it behind."""
    defaults = panel["fieldConfig"]["defaults"]
    values = lines[0].series.values if lines else np.empty(0)
    values = values[np.isfinite(values)]
    if not values.size:
        _write_title(figure, place, panel["title"], INK)
        _write_centered(figure, place, defaults["noValue"], FAINT)
        return
    value = float(values[-1])
    text, color = (
        write_figure(value, defaults["unit"], defaults.get("decimals")),
        pick_color(value, defaults["thresholds"]["steps"]),
    )
    for mapping in defaults.get("mappings", []):
        if found := mapping["options"].get(f"{value:g}"):
            text, color = found["text"], found["color"]
    _draw_box(figure, place, NAMED_COLORS[color])
    if panel["options"]["graphMode"] == "area" and values.size > 1:
        axis = _add_axes(figure, Rectangle(place.left + 4, place.bottom + 4, place.width - 8, place.height * 0.34))
        axis.set_axis_off()
        axis.fill_between(np.arange(values.size), values, color="white", alpha=0.22, linewidth=0)
        axis.plot(values, color="white", alpha=0.6, linewidth=1.2)
        axis.set_ylim(0, max(float(values.max()), 1e-9) * 1.05)
        axis.set_xlim(0, values.size - 1)
    _write_title(figure, place, panel["title"], "white")
    _write_centered(figure, place, text, "white")


def pick_color(value: float, steps: Sequence[dict[str, Any]]) -> str:
    """Returns the colour that a figure has by its thresholds, of which the first counts from the lowest value on."""
    return str([step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1])


def _draw_names(figure: Figure, place: Rectangle, lines: Sequence[Line]) -> None:
    top = place.bottom + place.height - TITLE_HEIGHT - 16
    for index, line in enumerate(lines):
        _write(figure, place.left + MARGIN + 4, top - index * 24, line.name.strip(), size=11.5, va="center")
    if not lines:
        _write_centered(figure, place, "no data", FAINT)


def _lay_out_legend(place: Rectangle, lines: Sequence[Line]) -> tuple[int, int]:
    if not lines:
        return 1, 0
    widest = max(len(line.name) for line in lines) * LETTER_WIDTH + HANDLE_WIDTH
    num_columns = max(1, min(len(lines), int((place.width - 2 * MARGIN) / widest)))
    return num_columns, math.ceil(len(lines) / num_columns)


def _add_axes(figure: Figure, place: Rectangle) -> Axes:
    width, height = figure.bbox.width, figure.bbox.height
    return figure.add_axes((place.left / width, place.bottom / height, place.width / width, place.height / height))


def _draw_box(figure: Figure, place: Rectangle, color: str) -> None:
    figure.patches.append(
        FancyBboxPatch(
            (place.left, place.bottom),
            place.width,
            place.height,
            boxstyle="round,pad=0,rounding_size=4",
            facecolor=color,
            edgecolor="#D5D9DE",
            linewidth=0.8,
            transform=None,
            figure=figure,
            zorder=-1,
        )
    )


def _write_title(figure: Figure, place: Rectangle, title: str, color: str) -> None:
    top = place.bottom + place.height
    _write(
        figure,
        place.left + MARGIN,
        top - TITLE_HEIGHT / 2 - 2,
        title,
        size=10.5,
        weight="bold",
        va="center",
        color=color,
    )


def _write_centered(figure: Figure, place: Rectangle, text: str, color: str) -> None:
    # Letters as large as the panel's width lets them be.
    size = min(26.0, 0.95 * place.width / max(len(text), 1))
    x, y = place.left + place.width / 2, place.bottom + (place.height - TITLE_HEIGHT) / 2 + 4
    _write(figure, x, y, text, size=size, weight="bold", ha="center", va="center", color=color)


def _write(figure: Figure, x: float, y: float, text: str, *, color: str = INK, **style: Any) -> None:
    figure.text(x / figure.bbox.width, y / figure.bbox.height, text, color=color, **style)
