"""Dashboards as pictures."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from scripts.dashboard_files import list_panels, load_dashboards
from scripts.panel_drawing import LINE_COLORS, NAMED_COLORS, Line, Rectangle, draw_panel, pick_color
from scripts.prometheus_queries import Series
from scripts.render_dashboards import STYLE, name_series

SPAN = (1_700_000_000.0, 1_700_000_600.0)
PLACE = Rectangle(10, 10, 380, 280)
PANELS = {panel["title"]: panel for dashboard in load_dashboards() for panel in list_panels(dashboard)}


def build_series(values: Callable[[np.ndarray], np.ndarray], **labels: str) -> Series:
    """Returns a series with a sample every ten seconds."""
    times = np.arange(SPAN[0], SPAN[1], 10)
    return Series(labels, times, values(np.linspace(0, 1, times.size)))


def count_pixels(panel: dict[str, Any], lines: list[Line], color: str) -> int:
    """Draws a panel and counts the pixels of one colour."""
    with mpl.rc_context(STYLE):
        figure = Figure((4, 3), dpi=100, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        draw_panel(figure, PLACE, panel, lines, SPAN)
        canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3].astype(int)
    wanted = np.round(np.array(to_rgb(color)) * 255).astype(int)
    return int((np.abs(pixels - wanted).max(axis=-1) <= 2).sum())


@pytest.mark.parametrize(("mismatches", "color", "other"), [(0.0, "green", "red"), (1.02, "red", "green")])
def test_a_figure_stands_on_the_color_of_its_threshold(mismatches: float, color: str, other: str) -> None:
    """No mismatch is green; one, as Prometheus estimates it, is red."""
    lines = [Line("mismatches", build_series(lambda x: mismatches + 0 * x))]
    assert count_pixels(PANELS["Mismatches"], lines, NAMED_COLORS[color]) > 20_000
    assert count_pixels(PANELS["Mismatches"], lines, NAMED_COLORS[other]) == 0


def test_a_figure_without_a_value_has_no_color() -> None:
    """No data is not good data."""
    for lines in ([], [Line("hit ratio", build_series(lambda x: np.nan * x))]):
        for color in NAMED_COLORS.values():
            assert count_pixels(PANELS["Hit ratio, decode plans"], lines, color) == 0


def test_a_lost_planner_is_red() -> None:
    """A connection that is lost looks like it."""
    lost = [Line("connected", build_series(lambda x: 0 * x))]
    assert count_pixels(PANELS["Planner connection"], lost, NAMED_COLORS["red"]) > 20_000


def test_the_color_of_a_word_counts() -> None:
    """Where a value stands for a word, its threshold does not matter."""
    panel = deepcopy(PANELS["Planner connection"])
    panel["fieldConfig"]["defaults"]["mappings"][0]["options"]["0"]["color"] = "blue"
    lost = [Line("connected", build_series(lambda x: 0 * x))]
    assert count_pixels(panel, lost, NAMED_COLORS["blue"]) > 20_000


@pytest.mark.parametrize("title", ["Hit ratio by plan label", "Plan latency by source", "Misses by reason"])
def test_every_series_has_a_line_of_its_own_color(title: str) -> None:
    """Lines, stacked ones and those on a logarithmic axis are all drawn."""
    lines = [
        Line("main", build_series(lambda x: 0.2 + 0.3 * x)),
        Line("cfg_text", build_series(lambda x: 0.6 - 0.1 * x)),
    ]
    for color in LINE_COLORS[:2]:
        assert count_pixels(PANELS[title], lines, color) > 100
    assert count_pixels(PANELS[title], lines, LINE_COLORS[2]) == 0


def test_stacked_series_stand_on_one_another() -> None:
    """Of two equal series the one does not hide the other."""
    lines = [Line(name, build_series(lambda x: 0.3 + 0.1 * x)) for name in ("rows", "fork")]
    assert count_pixels(PANELS["Misses by reason"], lines, LINE_COLORS[0]) > 100


def pick_one_panel_of_each_kind() -> dict[str, dict[str, Any]]:
    """Returns panels that differ in what they are drawn with, by their titles."""
    kinds = {}
    for panel in PANELS.values():
        custom = panel["fieldConfig"]["defaults"].get("custom", {})
        styles = [custom.get(name) for name in ("drawStyle", "stacking", "scaleDistribution", "thresholdsStyle")]
        figure = [panel["options"].get(name) for name in ("textMode", "graphMode")]
        kinds[str([panel["type"], panel["fieldConfig"]["defaults"]["unit"], *styles, *figure])] = panel
    return {panel["title"]: panel for panel in kinds.values()}


@pytest.mark.parametrize(("title", "panel"), pick_one_panel_of_each_kind().items())
def test_every_kind_of_panel_can_be_drawn_with_and_without_data(title: str, panel: dict[str, Any]) -> None:
    """An empty Prometheus gives a picture too."""
    lines = [Line("one", build_series(lambda x: x)), Line("two", build_series(lambda x: np.where(x > 0.5, x, np.nan)))]
    idle = [Line("idle", build_series(lambda x: np.nan * x))]
    for shown in ([], idle, lines):
        assert count_pixels(panel, shown, "white") > 100


@pytest.mark.parametrize(
    ("value", "color"), [(-5, "red"), (0.49, "red"), (0.5, "yellow"), (0.8, "green"), (2, "green")]
)
def test_a_color_begins_at_its_value(value: float, color: str) -> None:
    """A figure that equals a threshold has that threshold's colour."""
    steps = [
        {"value": None, "color": "red"},
        {"value": 0.5, "color": "yellow"},
        {"value": 0.8, "color": "green"},
    ]
    assert pick_color(value, steps) == color


def test_a_legend_takes_the_series_labels() -> None:
    """A label that the series does not have leaves nothing behind."""
    series = build_series(lambda x: x, session="session-1", kind="stall")
    assert name_series("{{pod}} {{ session }}: {{kind}}", series) == "session-1: stall"
