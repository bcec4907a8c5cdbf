"""Plots are pictures of what they say they are, and say what is missing where matplotlib is not installed."""

import sys
from pathlib import Path

import pytest

from ringplan_cli.errors import CommandError
from ringplan_cli.load.options import LatencyTargets
from ringplan_cli.load.plots import write_plots
from ringplan_cli.load.records import Outcome, RequestRecord
from tests.ringplan_cli.load.test_report import build_record

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    "records",
    [
        [
            build_record(0.0, first=0.25, end=1.25),
            build_record(0.5, end=0.5, outcome=Outcome.REFUSED, reason="QUEUE_FULL"),
            build_record(0.5, end=0.7, outcome=Outcome.FAILED, reason="UNAVAILABLE"),
        ],
        [build_record(0.0, outcome=Outcome.PENDING)],
    ],
)
def test_plots_are_two_pictures(tmp_path: Path, records: list[RequestRecord]) -> None:
    """Also of a test in which nothing came."""
    targets = LatencyTargets(ttft_target_seconds=0.5, inter_token_target_seconds=0.1)
    paths = write_plots(tmp_path / "new" / "plots", "tiny", records, targets, 2.0)
    assert [path.name for path in paths] == ["latency.png", "timeline.png"]
    assert all(path.read_bytes().startswith(PNG) for path in paths)


def test_missing_matplotlib_is_told_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and how to get it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CommandError, match=r"^plots need matplotlib: pip install 'ringplan\[bench\]'$"):
        write_plots(tmp_path, "tiny", [], LatencyTargets(), 1.0)


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A file stands in the way."""
    (tmp_path / "plots").write_text("")
    with pytest.raises(CommandError, match=f"--plots: {tmp_path}/plots: File exists"):
        write_plots(tmp_path / "plots", "tiny", [], LatencyTargets(), 1.0)
