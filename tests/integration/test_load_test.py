"""`ringplan bench serve` against real processes: what it counts is what the engine counts."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from ringplan_cli.app import app
from tests.engine_process import EngineProcess, run_engine
from tests.engine_service.tiny_models import save_tiny_checkpoint
from tests.planner_process import run_planner

# An engine imports torch and transformers first, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(180)

SETTINGS = {"num_pages": 201, "max_running_requests": 4, "max_queued_requests": 2}


@pytest.fixture
def engine(short_folder: Path, tmp_path: Path) -> Iterator[EngineProcess]:
    """A tiny engine that runs four contexts at once and lets two requests wait."""
    folder = save_tiny_checkpoint("llama", tmp_path / "tiny-llama")
    with (
        run_planner(short_folder) as planner,
        run_engine(short_folder, model=folder, planner=planner.target, **SETTINGS) as engine,
    ):
        yield engine


def count(engine: EngineProcess, name: str) -> float:
    """Returns the sum over the series of one of the engine's counters."""
    families = text_string_to_metric_families(engine.read_metrics())
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def test_overloaded_engine_refuses_and_the_report_says_how_often(engine: EngineProcess, tmp_path: Path) -> None:
    """Of 30 requests at once, guided ones and samples among them, some are turned away; the others get every token."""
    path = tmp_path / "requests.jsonl"
    flags = (
        "--rate inf --requests 30 --prompt-tokens uniform:4-20 --answer-tokens uniform:40-80 --guided-share 0.3 "
        "--samples-share 0.3 --samples 2 --json"
    )
    result = CliRunner().invoke(
        app, ["bench", "serve", "--target", engine.target, *flags.split(), "--requests-file", str(path)]
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    completed = [line for line in lines if line["outcome"] == "completed"]

    assert document["refusals"].keys() == {"QUEUE_FULL"}
    assert document["failures"] == {}
    assert len(lines) == len(completed) + document["refusals"]["QUEUE_FULL"] == 30
    assert all(line["answer_tokens"] == line["n"] * line["max_tokens"] for line in completed)
    assert all(line["usage_prompt_tokens"] == line["prompt_tokens"] for line in completed)
    assert document["answer_tokens"] == count(engine, "ringplan_generation_tokens_total")
    assert document["refusals"]["QUEUE_FULL"] == count(engine, "ringplan_requests_refused_total")
