"""Guided requests and samples in a pool that is too small for all of them, with plans ahead that take pages too."""

from pathlib import Path

import pytest
import torch

from engine_service.generation_spec import GenerationSpec, GuidanceContext, StoppingParams
from engine_service.sampling_params import SamplingParams
from tests.engine_runs import (
    Answers,
    RunningEngine,
    run_engine,
    wait_until_all_pages_are_free,
)
from tests.engine_service.tiny_models import VOCAB_SIZE, save_tiny_checkpoint
from tests.planner_process import PlannerProcess

pytestmark = pytest.mark.usefixtures("nan_in_new_memory")

# Prompt length, tokens to generate, further contexts, samples.
REQUESTS = ((9, 30, 1, 1), (20, 24, 0, 3), (5, 40, 2, 1), (30, 12, 0, 1), (14, 26, 1, 2), (3, 33, 0, 2), (8, 20, 0, 1))
# The largest request needs 4 contexts of 40 tokens or so.
NUM_TOKENS_IN_POOL = 170


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen 3."""
    return save_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def specs() -> list[GenerationSpec]:
    """The requests; a further context has the first half of its prompt, so that it is forked."""
    generator = torch.Generator().manual_seed(4)
    return [
        GenerationSpec(
            str(number),
            prompt := draw_tokens(generator, num_prompt_tokens),
            sampling=SamplingParams(temperature=0.9, seed=number)
            if num_samples > 1
            else SamplingParams(temperature=0.0),
            stopping=StoppingParams(max_tokens=num_tokens, ignore_eos=True),
            guidance=tuple(
                GuidanceContext(prompt[: num_prompt_tokens // 2] + draw_tokens(generator, 3), 1.5)
                for _ in range(num_contexts)
            ),
            num_samples=num_samples,
        )
        for number, (num_prompt_tokens, num_tokens, num_contexts, num_samples) in enumerate(REQUESTS)
    ]


def draw_tokens(generator: torch.Generator, count: int) -> tuple[int, ...]:
    """Returns random token ids."""
    return tuple(torch.randint(1, VOCAB_SIZE, (count,), generator=generator).tolist())


def answer_all(running: RunningEngine, specs: list[GenerationSpec]) -> dict[int, list[int]]:
    """Returns the tokens of each sample of each request."""
    answers = Answers(sum(spec.num_samples for spec in specs))
    first = 0
    for spec in specs:
        running.engine.submit_samples(spec, lambda sample, event, first=first: answers.take(first + sample, event))  # type: ignore[misc]  # mypy cannot infer a default.
        first += spec.num_samples
    answers.wait()
    return answers.token_ids


@pytest.fixture(scope="module")
def expected(planner_process: PlannerProcess, folder: Path, specs: list[GenerationSpec]) -> dict[int, list[int]]:
    """The tokens where each request has the engine to itself, and nothing is planned ahead, cached or padded.

    That these are right is what the tests of guidance and of samples show.
    """
    answers: dict[int, list[int]] = {}
    with run_engine(
        planner_process,
        folder,
        "roomy",
        page_size=16,
        num_pages=500,
        plan_ahead=0,
        cache_mode="off",
        pad_decode_batches=False,
    ) as running:
        for spec in specs:
            answers |= {len(answers) + sample: tokens for sample, tokens in answer_all(running, [spec]).items()}
    return answers


@pytest.mark.parametrize("guidance_plan", ["separate", "combined"])
@pytest.mark.parametrize(("plan_ahead", "page_size"), [(1, 4), (8, 4), (32, 1), (32, 4)])
def test_guided_requests_and_samples_get_their_tokens_however_short_pages_are(
    planner_process: PlannerProcess,
    folder: Path,
    specs: list[GenerationSpec],
    expected: dict[int, list[int]],
    plan_ahead: int,
    page_size: int,
    guidance_plan: str,
) -> None:
    """Requests are put back and computed again, pages planned ahead are given up, and no token changes."""
    with run_engine(
        planner_process,
        folder,
        f"short-{plan_ahead}-{page_size}-{guidance_plan}",
        page_size=page_size,
        num_pages=1 + NUM_TOKENS_IN_POOL // page_size,
        plan_ahead=plan_ahead,
        cache_mode="verify",
        guidance_plan=guidance_plan,
        max_running_requests=12,
        max_step_tokens=24,
    ) as running:
        assert answer_all(running, specs) == expected
        assert (running.registry.get_sample_value("ringplan_preemptions_total") or 0) > 0
        assert running.engine.wait_until_finished(10)
        wait_until_all_pages_are_free(running)
        assert running.find_session().num_cache_mismatches == 0
