"""Planning ahead and padding, with a real planner: tokens are those of transformers, however far plans are ahead."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from engine_service.engine import Engine
from engine_service.model_runner import ModelRunner
from engine_service.request import FinishReason, GenerationEvent, GenerationSpec, Request, StoppingParams
from planner_service.client import Plan
from tests.engine_runs import (
    Answers,
    RunningEngine,
    generate_with_transformers,
    run_engine,
    wait_until_all_pages_are_free,
)
from tests.engine_service.tiny_models import VOCAB_SIZE, save_tiny_checkpoint
from tests.planner_process import PlannerProcess

# Prompt length, tokens to generate, how many events must have come before it joins, and after how many of its own
# events its caller goes away (0: never).
CHURN = (
    (5, 45, 0, 0),
    (1, 12, 0, 0),
    (17, 4, 2, 0),
    (9, 50, 4, 7),
    (40, 15, 6, 0),
    (3, 40, 8, 0),
    (8, 2, 20, 0),
    (12, 60, 30, 11),
    (31, 10, 30, 0),
    (64, 6, 40, 0),
    (2, 30, 90, 0),
)

pytestmark = pytest.mark.usefixtures("nan_in_new_memory")
LEAVING = [number for number, churn in enumerate(CHURN) if churn[3]]


@pytest.fixture
def _nan_in_the_sink_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes NaN into the sink page before every step."""
    forward = ModelRunner.forward

    def poison_and_forward(
        runner: ModelRunner, token_ids: Mapping[str, torch.Tensor], plan: Plan, *args: object, **given: object
    ) -> object:
        runner.cache.pages[:, 0] = torch.nan
        return forward(runner, token_ids, plan, *args, **given)

    monkeypatch.setattr(ModelRunner, "forward", poison_and_forward)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return save_tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """A random prompt for each request."""
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()) for length, _, _, _ in CHURN]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """What transformers generates greedily, prompt by prompt."""
    return generate_with_transformers(folder, prompts, [num_tokens for _, num_tokens, _, _ in CHURN])


def answer_all(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> Answers:
    """Sends the requests, each once so many events have come; some callers go away; waits for the end of all."""
    answers = Answers(len(prompts))
    requests: dict[int, Request] = {}

    def take(number: int, event: GenerationEvent) -> None:
        answers.take(number, event)
        leaves_after = CHURN[number][3]
        if leaves_after and len(answers.token_ids[number]) == leaves_after and number not in answers.ended:
            engine.abort(requests[number])

    for number, prompt in enumerate(prompts):
        _, num_tokens, joins_at, _ = CHURN[number]
        answers.wait_for_events(joins_at)
        spec = GenerationSpec(str(number), prompt, stopping=StoppingParams(max_tokens=num_tokens))
        with answers.changed:
            # The engine's thread cannot tell of a token before the request is known here.
            requests[number] = engine.submit(spec, lambda event, number=number: take(number, event))  # type: ignore[misc]  # mypy cannot infer a default.
    answers.wait()
    return answers


def check_answers(answers: Answers, expected: Sequence[Sequence[int]]) -> None:
    """Checks every token; those who went away have got the first of theirs."""
    for number, tokens in enumerate(expected):
        if number in LEAVING:
            got = answers.token_ids[number]
            assert answers.ended[number].finish_reason is FinishReason.ABORT
            assert len(got) >= CHURN[number][3]
            assert got == tokens[: len(got)]
        else:
            assert answers.token_ids[number] == tokens


def read_plans_taken(running: RunningEngine, readiness: str) -> float:
    """Returns how many plans were ready, or waited for."""
    value = running.registry.get_sample_value("ringplan_plans_taken_total", {"readiness": readiness})
    assert value is not None
    return value


@pytest.mark.usefixtures("_nan_in_the_sink_page")
@pytest.mark.parametrize("cache_mode", ["off", "on", "verify"])
@pytest.mark.parametrize("plan_ahead", [0, 1, 2, 8, 32])
def test_tokens_are_the_same_however_far_plans_are_ahead(
    planner_process: PlannerProcess,
    folder: Path,
    prompts: list[tuple[int, ...]],
    expected: list[list[int]],
    plan_ahead: int,
    cache_mode: str,
) -> None:
    """Requests join, end and are aborted in a padded batch with NaN in the sink page; every token is transformers'."""
    with run_engine(
        planner_process,
        folder,
        f"ahead-{plan_ahead}-{cache_mode}",
        page_size=4,
        cache_mode=cache_mode,
        plan_ahead=plan_ahead,
        num_pages=150,
        max_running_requests=6,
        max_step_tokens=24,
    ) as running:
        check_answers(answer_all(running.engine, prompts), expected)
        assert running.engine.wait_until_finished(10)
        wait_until_all_pages_are_free(running)
        session = running.find_session()
        assert session.num_cache_mismatches == 0
        assert (session.num_cache_hits > 0) == (cache_mode != "off")
        # Without planning ahead a quick planner may have a plan ready now and then.
        assert not plan_ahead or read_plans_taken(running, "ready") > 0


@pytest.mark.parametrize("plan_ahead", [1, 8, 32])
def test_tokens_are_the_same_when_plans_ahead_take_the_last_pages(
    planner_process: PlannerProcess,
    folder: Path,
    prompts: list[tuple[int, ...]],
    expected: list[list[int]],
    plan_ahead: int,
) -> None:
    """With a pool little larger than the largest request, and pages of one token that plans ahead take many of."""
    with run_engine(
        planner_process,
        folder,
        f"short-{plan_ahead}",
        page_size=1,
        cache_mode="verify",
        plan_ahead=plan_ahead,
        num_pages=81,
        max_running_requests=6,
        max_step_tokens=32,
    ) as running:
        check_answers(answer_all(running.engine, prompts), expected)
        assert running.engine.wait_until_finished(10)
        wait_until_all_pages_are_free(running)
        assert running.find_session().num_cache_mismatches == 0


@pytest.mark.parametrize(("max_step_tokens", "pads"), [(6, True), (13, False), (200, True)])
def test_tokens_depend_neither_on_the_step_budget_nor_on_padding(
    planner_process: PlannerProcess,
    folder: Path,
    prompts: list[tuple[int, ...]],
    expected: list[list[int]],
    max_step_tokens: int,
    pads: bool,
) -> None:
    """Prompts go in by chunks of any size, beside requests that decode, with padding rows or without."""
    with run_engine(
        planner_process,
        folder,
        f"budget-{max_step_tokens}",
        page_size=4,
        num_pages=150,
        max_running_requests=6,
        max_step_tokens=max_step_tokens,
        pad_decode_batches=pads,
    ) as running:
        check_answers(answer_all(running.engine, prompts), expected)


def test_steady_batch_finds_its_plans_ready(
    planner_process: PlannerProcess, folder: Path, prompts: list[tuple[int, ...]]
) -> None:
    """One long answer: most plans are there when their step begins, and nearly every one is from the cache."""
    with run_engine(planner_process, folder, "steady", page_size=16, cache_mode="on", num_pages=150) as running:
        answers = Answers(1)
        spec = GenerationSpec("long", prompts[0], stopping=StoppingParams(max_tokens=400, ignore_eos=True))
        running.engine.submit(spec, lambda event: answers.take(0, event))
        answers.wait()
        # Nearly all are; a machine that runs much else beside this delays some.
        assert read_plans_taken(running, "ready") > 200
        assert running.find_session().num_cache_hits > 380
