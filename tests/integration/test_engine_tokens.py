"""A real planner process and an engine on tiny models: greedy tokens equal those of transformers' own generate."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine_service.engine import Engine
from engine_service.request import GenerationSpec, StoppingParams
from tests.engine_runs import (
    Answers,
    generate_with_transformers,
    run_engine,
    wait_until_all_pages_are_free,
)
from tests.engine_service.tiny_models import ARCHITECTURES, VOCAB_SIZE, save_tiny_checkpoint
from tests.planner_process import PlannerProcess

pytestmark = pytest.mark.usefixtures("nan_in_new_memory")

# Prompt length, tokens to generate, and how many events must have come before it joins.
CHURN = ((5, 20, 0), (1, 12, 0), (17, 4, 2), (40, 15, 6), (3, 25, 8), (8, 2, 20), (31, 10, 30), (64, 6, 40))


def build_prompts(seed: int = 1) -> list[tuple[int, ...]]:
    """Returns a random prompt for each request."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()) for length, _, _ in CHURN]


def answer_all(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> Answers:
    """Sends the requests, each once so many events have come, and waits for all of them."""
    answers = Answers(len(prompts))
    for number, (prompt, (_, num_tokens, joins_at)) in enumerate(zip(prompts, CHURN, strict=True)):
        answers.wait_for_events(joins_at)
        spec = GenerationSpec(str(number), prompt, stopping=StoppingParams(max_tokens=num_tokens))
        engine.submit(spec, lambda event, number=number: answers.take(number, event))  # type: ignore[misc]  # mypy cannot infer a default.
    answers.wait()
    return answers


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each architecture."""
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny_checkpoint(name, root / name) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """For each architecture what transformers generates greedily, prompt by prompt."""
    counts = [num_tokens for _, num_tokens, _ in CHURN]
    return {name: generate_with_transformers(folder, build_prompts(), counts) for name, folder in folders.items()}


@pytest.mark.parametrize(("page_size", "cache_mode"), [(1, "off"), (4, "on"), (16, "verify")])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_transformers_while_requests_join_and_leave(
    planner_process: PlannerProcess,
    folders: dict[str, Path],
    expected: dict[str, list[list[int]]],
    architecture: str,
    page_size: int,
    cache_mode: str,
) -> None:
    """Eight requests share batches and prompts go in by chunks; every token is transformers', every page comes back."""
    with run_engine(
        planner_process,
        folders[architecture],
        f"{architecture}-{page_size}",
        page_size=page_size,
        cache_mode=cache_mode,
        num_pages=1 + 400 // page_size,
        max_running_requests=6,
        max_step_tokens=24,
    ) as running:
        answers = answer_all(running.engine, build_prompts())
        assert [answers.token_ids[number] for number in range(len(CHURN))] == expected[architecture]
        assert running.engine.wait_until_finished(10)
        wait_until_all_pages_are_free(running)


def test_tokens_are_the_same_when_pages_run_out(
    planner_process: PlannerProcess, folders: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    """With a pool that holds little more than the largest request, others are put back and recomputed: same tokens."""
    with run_engine(
        planner_process, folders["llama"], "short-of-pages", page_size=4, num_pages=22, max_step_tokens=32
    ) as running:
        answers = answer_all(running.engine, build_prompts())
        assert [answers.token_ids[number] for number in range(len(CHURN))] == expected["llama"]
        preemptions = running.registry.get_sample_value("ringplan_preemptions_total")
        assert preemptions is not None
        assert preemptions > 0
        wait_until_all_pages_are_free(running)
