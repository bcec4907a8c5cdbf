"""An engine whose model reads nothing but copies of plans, as on a GPU: its tokens are right."""

import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_service import assembly
from engine_service.errors import NotEnoughMemoryError
from engine_service.model_runner import ModelRunner
from engine_service.request import GenerationSpec, GuidanceContext, StoppingParams
from tests.engine_runs import Answers, RunningEngine, run_engine
from tests.engine_service.copied_backend import CopiedSide, RerunCapturer
from tests.engine_service.tiny_models import VOCAB_SIZE, save_tiny_checkpoint
from tests.planner_process import PlannerProcess
from tests.reference.dense_guidance import generate_guided

pytestmark = pytest.mark.usefixtures("nan_in_new_memory")

NUM_TOKENS = 14
EOS_TOKEN_ID = 0


def _draw(num_tokens: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(1, VOCAB_SIZE, (num_tokens,), generator=generator).tolist())


# Prompt, contexts and their scales.
ASKED: tuple[tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[float, ...]], ...] = (
    (_draw(37, seed=1), (_draw(9, seed=2),), (1.5,)),
    (_draw(5, seed=3), (), ()),
    (_draw(30, seed=4), (_draw(45, seed=5), _draw(3, seed=6)), (2.5, 1.25)),
    (_draw(60, seed=7), (), ()),
    (_draw(1, seed=8), (), ()),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return save_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The answers by a dense reference on transformers' own attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [
        generate_guided(model, prompt, contexts, scales, NUM_TOKENS, EOS_TOKEN_ID) for prompt, contexts, scales in ASKED
    ]


def ask_all(running: RunningEngine) -> Answers:
    """Sends every request; returns what gathers the answers."""
    answers = Answers(len(ASKED))
    for number, (prompt, contexts, scales) in enumerate(ASKED):
        spec = GenerationSpec(
            str(number),
            prompt,
            stopping=StoppingParams(max_tokens=NUM_TOKENS),
            guidance=tuple(itertools.starmap(GuidanceContext, zip(contexts, scales, strict=True))),
        )
        running.engine.submit(spec, lambda event, number=number: answers.take(number, event))  # type: ignore[misc]  # mypy cannot infer a default.
    return answers


def wait_for_all(running: RunningEngine, answers: Answers) -> list[list[int]]:
    """Returns the answers once all of them are there."""
    answers.wait()
    assert running.engine.wait_until_finished(10)
    return [answers.token_ids[number] for number in range(len(ASKED))]


def answer_all(running: RunningEngine) -> list[list[int]]:
    """Returns the engine's answers."""
    return wait_for_all(running, ask_all(running))


def count_decode_steps(running: RunningEngine) -> tuple[float, float]:
    """Returns how many decode steps were replayed, and how many were not."""
    read = running.registry.get_sample_value
    replays, misses = read("ringplan_cuda_graph_replays_total"), read("ringplan_cuda_graph_misses_total")
    assert replays is not None
    assert misses is not None
    return replays, misses


SETTINGS = {"page_size": 4, "num_pages": 201, "max_running_requests": 8, "max_step_tokens": 40, "ring_depth": 2}


@pytest.mark.parametrize("guidance_plan", ["separate", "combined"])
@pytest.mark.parametrize(("cuda_graphs", "plan_ahead"), [(True, 8), (False, 8), (True, 0)])
def test_tokens_are_right(
    planner_process: PlannerProcess,
    folder: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    guidance_plan: str,
    cuda_graphs: bool,
    plan_ahead: int,
) -> None:
    """One to three labels, a ring of 2, decode steps replayed or not: tokens are those of the reference."""
    side = CopiedSide()
    side.take_part(monkeypatch)
    name = f"copies-{guidance_plan}-{cuda_graphs}-{plan_ahead}"
    options = {"guidance_plan": guidance_plan, "cuda_graphs": cuda_graphs, "plan_ahead": plan_ahead}
    with run_engine(planner_process, folder, name, **options, **SETTINGS) as running:
        assert answer_all(running) == expected
        replays, misses = count_decode_steps(running)
    assert side.copies.num_rewritten == 0
    if cuda_graphs:
        # Batches of prompts alone have their sizes captured at the start, other mixes at their first step.
        assert replays > NUM_TOKENS // 2
        assert misses == side.capturer.num_captured - 4
    else:
        assert (replays, misses, side.capturer.num_captured) == (0, 0, 0)


def test_a_failed_capture_turns_graphs_off_and_nothing_else(
    planner_process: PlannerProcess,
    folder: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says so once, decode steps are counted as run without a graph, and tokens are right."""
    CopiedSide(capturer=RerunCapturer(RuntimeError("operation not permitted"))).take_part(monkeypatch)
    with run_engine(planner_process, folder, "copies-failed", **SETTINGS) as running:
        assert answer_all(running) == expected
        replays, misses = count_decode_steps(running)
    assert replays == 0
    assert misses > NUM_TOKENS // 2
    assert caplog.text.count("run without CUDA graphs from now on") == 1


def test_a_lost_planner_is_replaced(
    own_planner: PlannerProcess, folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step ids start again with a new session, and so do copies; what was captured serves on."""
    side = CopiedSide()
    side.take_part(monkeypatch)
    with run_engine(own_planner, folder, "copies-lost", **SETTINGS) as running:
        assert answer_all(running) == expected
        own_planner.kill()
        own_planner.start()
        assert answer_all(running) == expected
    assert side.copies.num_rewritten == 0


def test_a_planner_that_is_lost_in_the_middle_of_answers_is_replaced(
    own_planner: PlannerProcess, folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that were planned ahead are gone with its memory; the answers go on from there, and are right."""
    side = CopiedSide()
    side.take_part(monkeypatch)
    with run_engine(own_planner, folder, "copies-lost-midway", **SETTINGS) as running:
        answers = ask_all(running)
        answers.wait_for_events(len(ASKED))
        own_planner.kill()
        own_planner.start()
        assert wait_for_all(running, answers) == expected
    assert side.copies.num_rewritten == 0
    assert all(event.is_made for event in side.copies.events)


def test_the_largest_step_is_left_out_of_the_cache(
    planner_process: PlannerProcess, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step takes is measured before pages are counted; a step that takes all there is leaves none."""
    CopiedSide().take_part(monkeypatch)
    asked: list[dict[str, int]] = []

    def measure(_runner: ModelRunner, **sizes: int) -> int:
        asked.append(sizes)
        return 1 << 60

    monkeypatch.setattr(assembly, "measure_step_bytes", measure)
    settings = {**SETTINGS, "num_pages": 0}
    with (
        pytest.raises(NotEnoughMemoryError),
        run_engine(planner_process, folder, "copies-no-room", **settings),
    ):
        pass
    assert asked == [{"max_step_tokens": 40, "max_running_requests": 8}]
