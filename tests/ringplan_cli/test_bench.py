"""Benchmarks measure what they say; nothing here looks at a clock."""

import json

from typer.testing import CliRunner

from planner_service.core.arrays import build_extents
from ringplan_cli.app import app
from ringplan_cli.bench_plan import PlanCase, PlanFigures, take_medians
from ringplan_cli.bench_scale import NUM_STEPS, PAGE_SIZE, ScaleCase, measure_scale
from ringplan_cli.bench_stream import Spread

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
        pages_now = sum(-(-(2 * 16 + row % 16 + 48) // 16) for row in range(rows))
        _, num_bytes = build_extents([("a", rows, rows, pages_now)] * 2)
        assert case["num_bytes"] == num_bytes
        assert all(
            case[f"{name}_us"] > 0 for name in ("full", "first", "cached", "cached_no_crossing", "naive", "memcpy")
        )


def test_bench_plan_measures_many_plan_labels_of_few_rows() -> None:
    """What stands between the arrays of many small plan labels has room too."""
    command = "bench plan --rows 1 --pages 1 --labels 100 --rounds 1 --json"
    result = RUNNER.invoke(app, command.split())
    assert result.exit_code == 0, result.output


def test_bench_plan_prints_a_table_with_a_row_a_case() -> None:
    """People get headings, a line a case and what the columns mean."""
    result = RUNNER.invoke(app, ["bench", "plan", "--rows", "2", "--pages", "3", "--labels", "1", "--rounds", "1"])
    assert result.exit_code == 0, result.output
    title, headings, case, *notes = result.stdout.splitlines()
    assert title.startswith("Microseconds a plan")
    assert headings.split()[:5] == ["labels", "rows", "pages", "bytes", "full"]
    assert case.split()[:3] == ["1", "2", "3"]
    assert " ".join(notes).startswith("full: from scratch.")


def test_bench_stream_measures_every_combination_on_a_real_planner() -> None:
    """Each case has its figures, and in step with an engine that is slow enough every plan is ready but the first."""
    command = (
        "bench stream --rows 2 --labels 1 --labels 3 --repeat 1 --repeat 4 --step-ms 0 --pages 2 --steps 20 --json"
    )
    result = RUNNER.invoke(app, command.split())
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert {"processor", "cores", "python", "numpy"} == document["machine"].keys()
    cases = document["cases"]
    assert [(case["num_labels"], case["num_rows"], case["repeat"], case["step_ms"]) for case in cases] == [
        (1, 2, 1, 0),
        (1, 2, 4, 0),
        (3, 2, 1, 0),
        (3, 2, 4, 0),
    ]
    for case in cases:
        assert case["ring_depth"] == 2 * case["repeat"]
        assert 0 <= case["ready_share"] <= 1
        assert all(case[f"calls_{name}_us"] > 0 for name in ("mean", "p50", "p99"))
        assert all(case[f"blocked_{name}_us"] >= 0 for name in ("mean", "p50", "p99"))
        figures = ("engine_cpu_us", "planner_cpu_us", "plans_per_second", "in_process_full_us", "in_process_cached_us")
        assert all(case[name] > 0 for name in (*figures, "unary_call_us"))
        assert case["num_stalls"] >= 0


def test_bench_stream_prints_a_table_with_a_row_a_case() -> None:
    """People get headings, a line a case and what the columns mean; a step may keep the thread busy."""
    command = "bench stream --rows 2 --labels 1 --repeat 2 --step-ms 0.1 --pages 2 --steps 5 --spin"
    result = RUNNER.invoke(app, command.split())
    assert result.exit_code == 0, result.output
    title, headings, case, *notes = result.stdout.splitlines()
    assert title.startswith("Microseconds a step")
    assert headings.split()[:6] == ["labels", "rows", "repeat", "depth", "step", "ms"]
    assert case.split()[:5] == ["1", "2", "2", "4", "0.1"]
    assert " ".join(notes).startswith("calls: the engine's thread")


def test_a_spread_has_the_mean_the_middle_and_the_slowest_hundredth() -> None:
    """Times come in nanoseconds and go out in microseconds."""
    assert Spread.of([1000 * value for value in range(200)]) == Spread(mean=99.5, p50=100.0, p99=198.0)
    assert Spread.of([5000]) == Spread(5.0, 5.0, 5.0)


def test_bench_scale_weighs_a_planner_that_holds_what_the_case_says() -> None:
    """The pages it counts are those of the streams after the timed steps; the region is in shared memory."""
    (figures,) = measure_scale((ScaleCase("two small sessions", 2, 3, 20, 2),))
    pages_of_a_row, pages_of_a_resting_stream = -(-(20 + NUM_STEPS) // PAGE_SIZE), 2
    assert figures.num_pages_held == 2 * (2 * pages_of_a_row + pages_of_a_resting_stream)
    assert figures.region_bytes > 0
    assert figures.plan_us > 0


def test_medians_over_turns_leave_out_a_turn_that_was_disturbed() -> None:
    """Each figure by itself; the naive reference is asked in the first turn alone."""
    case = PlanCase(num_rows=1, num_pages=1, num_labels=1)
    turns = [
        PlanFigures(case, 64, 3.0, 2.0, 1.0, 0.5, 9.0, 0.1),
        PlanFigures(case, 64, 90.0, 2.5, 1.5, 0.6, None, 0.2),
        PlanFigures(case, 64, 4.0, 80.0, 70.0, 60.0, None, 50.0),
    ]
    assert take_medians(turns) == PlanFigures(case, 64, 4.0, 2.5, 1.5, 0.6, 9.0, 0.2)
