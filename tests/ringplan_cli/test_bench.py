"""Benchmarks measure what they say; nothing here looks at a clock."""

import json

from typer.testing import CliRunner

from planner_service.core.arrays import build_extents
from ringplan_cli.app import app
from ringplan_cli.bench_scale import NUM_STEPS, PAGE_SIZE, ScaleCase, measure_scale

RUNNER = CliRunner()


def test_bench_plan_measures_plans_of_the_size_it_names() -> None:
    """Every combination is a case, and its bytes are those of a plan with so many rows on so many pages."""
    command = "bench plan --rows 2 --rows 5 --pages 3 --labels 2 --rounds 1 --json"
    result = RUNNER.invoke(app, command.split())
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert {"processor", "cores", "python", "numpy"} == document["machine"].keys()
    assert [(case["num_labels"], case["num_rows"], case["num_pages"]) for case in document["cases"]] == [
        (2, 2, 3),
        (2, 5, 3),
    ]
    for case in document["cases"]:
        rows = case["num_rows"]
        pages_now = sum(-(-(2 * 16 + row % 16 + 32) // 16) for row in range(rows))
        _, num_bytes = build_extents([("a", rows, rows, pages_now)] * 2)
        assert case["num_bytes"] == num_bytes
        assert all(case[f"{name}_us"] > 0 for name in ("full", "cached", "cached_no_crossing", "naive", "memcpy"))


def test_bench_plan_prints_a_table_with_a_row_a_case() -> None:
    """People get headings, a line a case and what the columns mean."""
    result = RUNNER.invoke(app, ["bench", "plan", "--rows", "2", "--pages", "3", "--labels", "1", "--rounds", "1"])
    assert result.exit_code == 0, result.output
    title, headings, case, *notes = result.stdout.splitlines()
    assert title.startswith("Microseconds a plan")
    assert headings.split()[:5] == ["labels", "rows", "pages", "bytes", "full"]
    assert case.split()[:3] == ["1", "2", "3"]
    assert " ".join(notes).startswith("full: from scratch.")


def test_bench_scale_weighs_a_planner_that_holds_what_the_case_says() -> None:
    """The pages it counts are those of the streams after the timed steps; the region is in shared memory."""
    (figures,) = measure_scale((ScaleCase("two small sessions", 2, 3, 20, 2),))
    pages_of_a_row, pages_of_a_resting_stream = -(-(20 + NUM_STEPS) // PAGE_SIZE), 2
    assert figures.num_pages_held == 2 * (2 * pages_of_a_row + pages_of_a_resting_stream)
    assert figures.region_bytes > 0
    assert figures.plan_us > 0
