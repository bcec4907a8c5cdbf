"""`ringplan bench engine` on a tiny model: every part of it runs, and counts the tokens that were asked for."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringplan_cli.app import app
from ringplan_cli.bench_engine import OPTIONS
from ringplan_cli.load.schedule import build_schedule
from tests.engine_service.tiny_models import save_tiny_checkpoint

# Two processes import torch and transformers first, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(240)


def test_engine_and_yardsticks_answer_the_same_requests(tmp_path: Path) -> None:
    """A case each, with the tokens of its requests and figures for the engine and all that it is held against."""
    folder = save_tiny_checkpoint("llama", tmp_path / "tiny-llama")
    flags = f"--model {folder} --num-pages 101 --num-threads 1 --concurrency 1 --concurrency 3"
    more = "--rounds 1 --repeats 2 --arrivals 0.1 --json"
    result = CliRunner().invoke(app, ["bench", "engine", *flags.split(), *more.split()])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["model"] == "tiny-llama"
    assert document["machine"]["threads"] == "1 threads"
    requests = build_schedule(OPTIONS)
    for case, count in zip(document["cases"], (1, 3), strict=True):
        assert (case["concurrency"], case["requests"]) == (count, count)
        assert case["answer_tokens"] == sum(request.max_tokens for request in requests[:count])
        figures = ("engine", "generate", "continuous", "forward")
        assert all(case[f"{name}_tokens_per_second"] > 0 for name in figures)
        assert all(case[f"engine_over_{name}"] > 0 for name in figures[1:])
        assert case["server_cpu_seconds_a_step"] > 0
    assert document["arrivals"]["requests"] >= 1
    assert document["arrivals"]["ttft_seconds"].keys() == {"p50", "p90", "p95", "p99"}
    planners = document["planners"]
    assert [(row["planner"], row["cache_mode"]) for row in planners] == [
        (where, mode) for mode in ("off", "on", "verify") for where in ("process", "in-process")
    ]
    for row in planners:
        parts = ("scheduling", "planning", "sampling", "answers", "forward")
        assert sum(row[f"{part}_seconds"] for part in parts) == pytest.approx(row["step_seconds"], rel=0.5)


def test_short_form_prints_three_tables(tmp_path: Path) -> None:
    """People get tokens a second, latencies under random arrivals, and a line a planner and cache mode."""
    folder = save_tiny_checkpoint("llama", tmp_path / "tiny-llama")
    flags = f"--model {folder} --num-pages 101 --num-threads 1 --concurrency 2 --short --arrivals 0.1"
    result = CliRunner().invoke(app, ["bench", "engine", *flags.split()])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert any(line.startswith("tiny-llama (") for line in lines)
    assert "Random (Poisson) arrivals, milliseconds" in lines
    start = lines.index("Milliseconds a step")
    assert [line.split()[:3] for line in lines[start + 2 : start + 8]] == [
        [where, mode, "2"] for mode in ("off", "on", "verify") for where in ("process", "in-process")
    ]


def test_model_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    """The engine that was started for it says why it ended."""
    result = CliRunner().invoke(app, ["bench", "engine", "--model", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert "the engine ended with exit status" in str(result.exception)
    assert "none" in str(result.exception)
