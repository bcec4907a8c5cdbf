"""How planning grows: what is measured, worked out, printed and drawn."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringplan_cli import bench_growth
from ringplan_cli.app import app
from ringplan_cli.bench_growth import GrowthFigures, MemoryCost, PlanCost, build_plan_cases, weigh
from ringplan_cli.bench_scale import ScaleFigures
from ringplan_cli.errors import CommandError
from ringplan_cli.growth_plot import write_growth_plot

PNG = b"\x89PNG\r\n\x1a\n"


def _weighed(num_streams: int, num_pages: int, num_sessions: int = 1) -> ScaleFigures:
    """A planner of which a stream takes 100 bytes, a page 7, a session 5,000 and its region 3,000."""
    private = num_sessions * 5_000 + num_streams * 100 + num_pages * 7
    return ScaleFigures("case", num_pages, private, num_sessions * 3_000, 500.0)


def test_one_quantity_grows_at_a_time() -> None:
    """Each case differs from the others of its quantity in that quantity alone, and is named by it."""
    cases = list(build_plan_cases())
    fields = {"rows": "num_rows", "pages a row": "num_pages", "plan labels": "num_labels"}
    for quantity, field in fields.items():
        of_quantity = [(value, case) for name, value, case in cases if name == quantity]
        assert [getattr(case, field) for _, case in of_quantity] == [value for value, _ in of_quantity]
        for other in set(fields.values()) - {field}:
            assert len({getattr(case, other) for _, case in of_quantity}) == 1
    assert {name for name, _, _ in cases} == fields.keys()


def test_what_one_more_takes_is_found_from_differences() -> None:
    """Streams are weighed without the pages that came with them."""
    sessions = [(1, _weighed(0, 0, 1)), (9, _weighed(0, 0, 9))]
    memory = weigh(_weighed(10, 100), _weighed(60, 700), _weighed(10, 5_000), 50, sessions)
    assert memory == MemoryCost(stream=100.0, page=7.0, session=5_000.0, session_region=3_000.0)


def test_a_planner_that_gave_memory_back_is_an_outlier() -> None:
    """One case whose memory is far below the others does not change what a session takes."""
    lower = ScaleFigures("case", 0, 0, 32 * 3_000, 500.0)
    sessions = [*((count, _weighed(0, 0, count)) for count in (1, 2, 4, 8, 16)), (32, lower)]
    memory = weigh(_weighed(10, 100), _weighed(60, 700), _weighed(10, 5_000), 50, sessions)
    assert (memory.session, memory.session_region) == (5_000.0, 3_000.0)


def test_bench_growth_measures_prints_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run over few sizes on real planner processes; the picture is a PNG, and the document has every figure."""
    for name, sizes in (("ROWS", (2,)), ("PAGES", (1,)), ("LABELS", (1, 2)), ("SESSIONS", (1, 2))):
        monkeypatch.setattr(bench_growth, name, sizes)
    monkeypatch.setattr(bench_growth, "_STREAMS", (40, 50))
    monkeypatch.setattr(bench_growth, "_STREAM_TOKENS", (16, 64))
    plot = tmp_path / "growth.png"
    command = ["bench", "growth", "--rounds", "2", "--plot", str(plot), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [(cost["quantity"], cost["value"]) for cost in document["plans"]] == [
        ("rows", 2),
        ("pages a row", 1),
        ("plan labels", 1),
        ("plan labels", 2),
    ]
    assert all(cost[name] > 0 for cost in document["plans"] for name in ("full", "cached", "steady"))
    assert [count for count, _ in document["sessions"]] == [1, 2]
    assert document["memory"]["session_region"] > 0
    assert plot.read_bytes().startswith(PNG)


def test_a_picture_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """The reason, in one line."""
    figures = GrowthFigures(
        plans=(PlanCost("rows", 1, 3.0, 2.0, 1.0),),
        sessions=((1, _weighed(1, 1)),),
        memory=MemoryCost(1.0, 1.0, 1.0, 1.0),
    )
    with pytest.raises(CommandError, match=r"^the picture cannot be written: .*No such file or directory"):
        write_growth_plot(tmp_path / "missing" / "growth.png", "a machine", figures)
