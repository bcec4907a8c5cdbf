"""Asking a real Prometheus, and drawing from what it says."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from scripts import render_dashboards
from scripts.dashboard_files import load_dashboards
from scripts.install_prometheus import find_program
from scripts.prometheus_queries import Prometheus
from tests.deploy.prometheus_process import run_prometheus

START, END = 1_700_000_000.0, 1_700_000_060.0
# Nobody serves there: this Prometheus knows nothing but what a query gives it.
NOWHERE = {"planner": "127.0.0.1:1", "engine": "127.0.0.1:1"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus."""
    program = find_program("prometheus")
    if program is None:
        pytest.skip("prometheus is neither on the PATH nor could scripts/install_prometheus.py fetch it")
    with run_prometheus(program, tmp_path_factory.mktemp("prometheus"), NOWHERE) as prometheus:
        yield prometheus.url


def test_a_query_gives_samples_at_its_steps(url: str) -> None:
    """Times and values are numbers, from the first step to the last."""
    (series,) = Prometheus(url + "/").query_range("time() - 1700000000", START, END, 20)
    assert series.labels == {}
    np.testing.assert_array_equal(series.times, [START, START + 20, START + 40, END])
    np.testing.assert_array_equal(series.values, [0, 20, 40, 60])


def test_series_come_in_the_order_of_their_labels(url: str) -> None:
    """So that a line has the same colour in every picture; what is no number stays none."""
    expr = 'label_replace(vector(1), "kind", "stall", "", "") or label_replace(vector(0) / 0, "kind", "b", "", "")'
    first, second = Prometheus(url).query_range(expr, START, END, 30)
    assert (first.labels, second.labels) == ({"kind": "b"}, {"kind": "stall"})
    assert np.isnan(first.values).all()
    np.testing.assert_array_equal(second.values, [1, 1, 1])


def test_a_query_that_is_none_is_named_in_the_error(url: str) -> None:
    """Whoever changed a panel sees which query is wrong, and what Prometheus says of it."""
    with pytest.raises(ValueError, match=r"(?s)sum\(.*parse error"):
        Prometheus(url).query_range("sum(", START, END, 30)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nowhere", "http://[", "http://127.0.0.1:port"])
def test_an_address_without_a_prometheus_is_one_clear_line(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends with the address and what is wrong with it."""
    monkeypatch.setattr(sys, "argv", ["render", "--prometheus", url, "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=rf"^error: no Prometheus answers at {re.escape(url)}: .+$"):
        render_dashboards.main()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "some"])
def test_a_time_that_cannot_be_shown_is_refused_by_name(
    minutes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is drawn or asked."""
    monkeypatch.setattr(sys, "argv", ["render", "--prometheus", "x", "--out", str(tmp_path), "--minutes", minutes])
    with pytest.raises(SystemExit, match="2"):
        render_dashboards.main()
    assert f"argument --minutes: invalid minutes value: '{minutes}'" in capsys.readouterr().err


def test_the_command_draws_every_dashboard(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One picture each, as high as its lowest panel needs."""
    monkeypatch.setattr(sys, "argv", ["render", "--prometheus", url, "--out", str(tmp_path / "new"), "--minutes", "1"])
    render_dashboards.main()
    dashboards = {dashboard["title"]: dashboard for dashboard in load_dashboards()}
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "dashboard-inference.png",
        "dashboard-plan-cache-health.png",
    }
    pixels = imread(tmp_path / "new" / "dashboard-inference.png")
    places = [panel["gridPos"] for panel in dashboards["Inference"]["panels"]]
    assert pixels.shape[0] >= max(place["y"] + place["h"] for place in places) * render_dashboards.CELL_HEIGHT
    assert pixels.shape[1] > 1000
