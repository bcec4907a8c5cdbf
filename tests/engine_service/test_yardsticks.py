"""What the engine is measured against answers the same tasks with the same tokens."""

from pathlib import Path

import pytest

from engine_service.config import EngineSettings
from engine_service.model_loading import LoadedModel, load_model
from engine_service.offline import ANSWERS, FORWARD, PLANNING, SAMPLING, SCHEDULING, open_runner, run_offline
from engine_service.yardsticks import Task, generate_continuously, generate_in_batches, time_bare_steps
from planner_service.client import CacheMode
from ringplan_cli.bench_engine_in_process import InProcessPlanner
from tests.engine_service.tiny_models import save_tiny_checkpoint

TASKS = [Task(tuple(range(3, 3 + length)), num_new) for length, num_new in ((5, 4), (9, 7), (2, 1), (7, 5), (3, 6))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return save_tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    """It, loaded."""
    return load_model(folder)


def test_batches_do_not_change_answers(loaded: LoadedModel) -> None:
    """Each answer has the tokens asked for, and those of the prompt run alone."""
    answers, seconds = generate_in_batches(loaded, TASKS, 2)
    assert [len(answer) for answer in answers] == [4, 7, 1, 5, 6]
    assert answers == [generate_in_batches(loaded, [task], 1)[0][0] for task in TASKS]
    assert seconds > 0


def test_continuous_batching_gives_the_same_answers(loaded: LoadedModel) -> None:
    """More tasks than run at once, of all lengths; the model's own attention is back afterwards."""
    before = loaded.model.config._attn_implementation
    answers, _ = generate_continuously(loaded, TASKS, 2)
    assert answers == generate_in_batches(loaded, TASKS, 2)[0]
    assert loaded.model.config._attn_implementation == before


def test_bare_steps_are_timed_one_by_one(loaded: LoadedModel) -> None:
    """As many times as steps."""
    times = time_bare_steps(loaded, 3, 5, 4)
    assert len(times) == 4
    assert min(times) > 0


def test_loop_without_a_server_gives_the_same_answers(folder: Path, loaded: LoadedModel) -> None:
    """With packed weights too; the parts of its time add up, and the runner is as it was."""
    runner = open_runner(EngineSettings(model=str(folder), page_size=4), 40)
    planner = InProcessPlanner(page_size=4, num_pages=40, max_streams=2, cache_mode=CacheMode.VERIFY)
    run = run_offline(runner, planner, TASKS, 2)
    planner.close()
    assert run.answers == generate_in_batches(loaded, TASKS, 2)[0]
    assert run.part_seconds.keys() == {SCHEDULING, PLANNING, FORWARD, SAMPLING, ANSWERS}
    assert sum(run.part_seconds.values()) == pytest.approx(run.seconds)
    assert sum(run.decode.part_seconds.values()) == pytest.approx(run.decode.seconds)
    assert 0 < run.decode.num_steps < run.num_steps
    assert 0 < run.decode.num_tokens <= 2 * run.decode.num_steps
    assert "forward" not in vars(runner)
