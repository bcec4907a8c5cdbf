"""A planner that is killed or hangs, again and again, under running requests: their callers see a pause, no more."""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine_service.engine import Engine
from engine_service.generation_spec import GenerationSpec, GuidanceContext, StoppingParams
from engine_service.request import FinishReason
from engine_service.sampling_params import SamplingParams
from tests.engine_runs import (
    Answers,
    RunningEngine,
    generate_with_transformers,
    run_engine,
    wait_until_all_pages_are_free,
)
from tests.engine_service.tiny_models import VOCAB_SIZE, save_tiny_checkpoint
from tests.planner_process import PlannerProcess

pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("nan_in_new_memory")]

NUM_KILLS = 20
NUM_HANGS = 3
# Prompt length, tokens to generate and further contexts of eight requests; the first four are greedy and plain, the
# others are sampled by a seed.
REQUESTS = ((5, 330, 0), (60, 300, 0), (1, 300, 0), (120, 360, 0), (17, 320, 1), (9, 300, 0), (33, 340, 2), (2, 300, 1))
NUM_GREEDY = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return save_tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def specs() -> list[GenerationSpec]:
    """The requests."""
    generator = torch.Generator().manual_seed(9)
    return [
        GenerationSpec(
            str(number),
            draw_tokens(generator, num_prompt_tokens),
            sampling=SamplingParams(temperature=0.0 if number < NUM_GREEDY else 0.8, seed=number),
            stopping=StoppingParams(max_tokens=num_tokens, ignore_eos=True),
            guidance=tuple(GuidanceContext(draw_tokens(generator, 7), 1.5) for _ in range(num_contexts)),
        )
        for number, (num_prompt_tokens, num_tokens, num_contexts) in enumerate(REQUESTS)
    ]


def draw_tokens(generator: torch.Generator, count: int) -> tuple[int, ...]:
    """Returns random token ids."""
    return tuple(torch.randint(1, VOCAB_SIZE, (count,), generator=generator).tolist())


@pytest.fixture(scope="module")
def expected(planner_process: PlannerProcess, folder: Path, specs: list[GenerationSpec]) -> dict[int, list[int]]:
    """The tokens of an undisturbed run; those of the greedy requests are transformers', up to its end of sequence."""
    with run_lively_engine(planner_process, folder, "undisturbed") as running:
        answers = send_all(running.engine, specs)
        answers.wait()
    greedy = specs[:NUM_GREEDY]
    by_transformers = generate_with_transformers(
        folder, [spec.prompt_token_ids for spec in greedy], [spec.stopping.max_tokens or 0 for spec in greedy]
    )
    for number, tokens in enumerate(by_transformers):
        assert answers.token_ids[number][: len(tokens)] == tokens
    return answers.token_ids


def run_lively_engine(planner: PlannerProcess, folder: Path, name: str, guidance_plan: str = "separate"):  # type: ignore[no-untyped-def]  # noqa: ANN201  # As `run_engine` says.
    """Runs an engine that gives a silent planner up soon."""
    return run_engine(
        planner,
        folder,
        name,
        page_size=4,
        num_pages=800,
        max_running_requests=16,
        max_step_tokens=256,
        plan_ahead=8,
        cache_mode="verify",
        plan_timeout_seconds=0.3,
        guidance_plan=guidance_plan,
    )


def send_all(engine: Engine, specs: list[GenerationSpec]) -> Answers:
    """Sends the requests."""
    answers = Answers(len(specs))
    for number, spec in enumerate(specs):
        engine.submit(spec, lambda event, number=number: answers.take(number, event))  # type: ignore[misc]  # mypy cannot infer a default.
    return answers


def count_losses(running: RunningEngine) -> float:
    """Returns how often the engine has lost its planner."""
    losses = running.registry.get_sample_value("ringplan_planner_lost_total")
    assert losses is not None
    return losses


def disturb(answers: Answers, times: int, harm: Callable[[], None]) -> None:
    """Harms the planner so many times, at random moments: between tokens, or while the engine still recovers.

    Args:
        answers: what the requests have got.
        times: how often.
        harm: harms the planner, and returns once it is well again.
    """
    generator = random.Random(5)
    for _ in range(times):
        if generator.random() < 0.8:
            answers.wait_for_events(answers.num_events + 1 + generator.randrange(24))
        time.sleep(generator.random() * 0.01)
        harm()
    assert len(answers.ended) < answers.num_requests, f"all was over before the planner was harmed {times} times"


def test_tokens_outlive_a_planner_that_is_killed_at_random_moments(
    own_planner: PlannerProcess, folder: Path, specs: list[GenerationSpec], expected: dict[int, list[int]]
) -> None:
    """Twenty planners die under plain and guided requests: tokens are those of an undisturbed run."""

    def kill_and_replace() -> None:
        own_planner.kill()
        own_planner.start()

    with run_lively_engine(own_planner, folder, "killed", "combined") as running:
        answers = send_all(running.engine, specs)
        disturb(answers, NUM_KILLS, kill_and_replace)
        answers.wait()
        # One that dies before the engine has found it is not missed.
        assert NUM_KILLS // 2 <= count_losses(running) <= NUM_KILLS
        assert answers.token_ids == expected
        assert {ended.finish_reason for ended in answers.ended.values()} == {FinishReason.LENGTH}
        assert running.engine.wait_until_finished(10)
        wait_until_all_pages_are_free(running)
        assert running.find_session().num_cache_mismatches == 0


def test_tokens_outlive_a_planner_that_hangs(
    own_planner: PlannerProcess, folder: Path, specs: list[GenerationSpec], expected: dict[int, list[int]]
) -> None:
    """A planner that stops answering is given up, and asked again until it answers; tokens stay the same."""
    with run_lively_engine(own_planner, folder, "hanging") as running:
        answers = send_all(running.engine, specs)

        def pause_until_given_up() -> None:
            answers.wait_for_events(answers.num_events + 1)
            num_losses = count_losses(running)
            own_planner.pause()
            while count_losses(running) == num_losses:
                threading.Event().wait(0.005)
            own_planner.go_on()

        disturb(answers, NUM_HANGS, pause_until_given_up)
        answers.wait()
        assert answers.token_ids == expected
        assert running.engine.wait_until_finished(10)
        wait_until_all_pages_are_free(running)
