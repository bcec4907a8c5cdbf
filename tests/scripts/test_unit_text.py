"""Figures with their units."""

import pytest

from scripts.dashboard_files import list_panels, load_dashboards
from scripts.unit_text import write_figure

# As Grafana 11 shows these values.
FIGURES = [
    (0.0, "s", "0 s"),
    (0.000012, "s", "12 µs"),
    (0.00034, "s", "340 µs"),
    (0.0123, "s", "12.3 ms"),
    (1.5, "s", "1.5 s"),
    (90.0, "s", "1.5 min"),
    (7200.0, "s", "2 hour"),
    (0.934, "percentunit", "93.4%"),
    (1.0, "percentunit", "100%"),
    (1536.0, "bytes", "1.5 KiB"),
    (3.0 * 2**30, "bytes", "3 GiB"),
    (12.0, "short", "12"),
    (12_345.0, "short", "12.3 K"),
    (-1.0, "none", "-1"),
    (123_456.0, "none", "123456"),
    (0.25, "ops", "0.25 ops/s"),
    (2.0, "reqps", "2 req/s"),
    (250.0, "suffix: tokens/s", "250 tokens/s"),
]


@pytest.mark.parametrize(("value", "unit", "text"), FIGURES)
def test_figures_read_as_in_grafana(value: float, unit: str, text: str) -> None:
    """A picture in the documentation shows the figures that a reader will see."""
    assert write_figure(value, unit) == text


def test_decimals_can_be_set() -> None:
    """What is counted has no decimals, though Prometheus estimates them."""
    assert write_figure(1.02, "short", 0) == "1"
    assert write_figure(0.1, "percentunit", 2) == "10.00%"


def test_every_unit_of_the_dashboards_can_be_written() -> None:
    """A panel with a new unit is not drawn with figures that say nothing."""
    for dashboard in load_dashboards():
        for panel in list_panels(dashboard):
            assert "1" in write_figure(1.0, panel["fieldConfig"]["defaults"]["unit"])


def test_an_unknown_unit_is_refused() -> None:
    """Its name and the file to change are in the message."""
    with pytest.raises(ValueError, match=r"furlongs.*unit_text"):
        write_figure(1.0, "furlongs")
