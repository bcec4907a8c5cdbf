"""Several samples of one prompt on a real planner: one prefill, shared pages, and the samples of single requests."""

import threading
from pathlib import Path

import pytest
import torch

from engine_service.engine import Engine
from engine_service.request import GeneratedDelta, GenerationEvent, GenerationSpec, GuidanceContext, StoppingParams
from engine_service.sampling_params import SamplingParams
from ringplan.planner.v1 import planner_pb2
from tests.engine_runs import Answers, run_engine, wait_until_all_pages_are_free
from tests.engine_service.tiny_models import VOCAB_SIZE, save_tiny_checkpoint
from tests.planner_process import PlannerProcess

pytestmark = pytest.mark.usefixtures("nan_in_new_memory")

NUM_SAMPLES = 4
PAGE_SIZE = 4
NUM_TOKENS = 24
PROMPT = tuple(torch.randint(1, VOCAB_SIZE, (42,), generator=torch.Generator().manual_seed(3)).tolist())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return save_tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


def _build_spec(seed: int, num_samples: int, contexts: tuple[tuple[int, ...], ...] = ()) -> GenerationSpec:
    return GenerationSpec(
        "r",
        PROMPT,
        sampling=SamplingParams(temperature=1.0, seed=seed),
        stopping=StoppingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
        guidance=tuple(GuidanceContext(context, 1.5) for context in contexts),
        num_samples=num_samples,
    )


def _sample(engine: Engine, spec: GenerationSpec) -> list[list[int]]:
    answers = Answers(spec.num_samples)
    engine.submit_samples(spec, answers.take)
    answers.wait()
    return [answers.token_ids[number] for number in range(spec.num_samples)]


@pytest.mark.parametrize("contexts", [(), ((*PROMPT[:20], 7, 8, 9),)], ids=["plain", "guided"])
def test_samples_are_those_of_single_requests(
    planner_process: PlannerProcess, folder: Path, contexts: tuple[tuple[int, ...], ...]
) -> None:
    """Sample i of a request with seed s is the answer to a request for one sample with seed s + i, also at 2^64."""
    seed = 2**64 - 2
    with run_engine(
        planner_process, folder, "seeds", page_size=PAGE_SIZE, num_pages=200, max_step_tokens=32
    ) as running:
        together = _sample(running.engine, _build_spec(seed, NUM_SAMPLES, contexts))
        single = [
            _sample(running.engine, _build_spec((seed + number) % 2**64, 1, contexts))[0]
            for number in range(NUM_SAMPLES)
        ]
        assert together == single
        assert len({tuple(tokens) for tokens in together}) == NUM_SAMPLES, "other seeds, other samples"
        wait_until_all_pages_are_free(running)


def test_samples_hold_the_prompt_once_and_a_tail_each(planner_process: PlannerProcess, folder: Path) -> None:
    """At every token the planner counts the prompt's full pages once, and for each sample the pages of its own tail."""
    seen: list[planner_pb2.SessionSummary] = []
    ended = threading.Event()
    num_left = NUM_SAMPLES

    with run_engine(
        planner_process, folder, "shared", page_size=PAGE_SIZE, num_pages=200, max_step_tokens=32, plan_ahead=0
    ) as running:

        def take(sample: int, event: GenerationEvent) -> None:
            # In the engine's thread, after a step: what the planner holds is what that step needed.
            nonlocal num_left
            if not isinstance(event, GeneratedDelta):
                num_left -= 1
                if not num_left:
                    ended.set()
            elif sample == 0:
                seen.append(running.find_session())

        running.engine.submit_samples(_build_spec(1, NUM_SAMPLES), take)
        assert ended.wait(30)
        wait_until_all_pages_are_free(running)
    num_prompt_pages = (len(PROMPT) - 1) // PAGE_SIZE
    assert len(seen) == NUM_TOKENS
    for number, session in enumerate(seen):
        num_tail_tokens = len(PROMPT) + number - num_prompt_pages * PAGE_SIZE
        num_tail_pages = -(-num_tail_tokens // PAGE_SIZE)
        assert session.num_shared_pages == num_prompt_pages
        assert session.num_pages - 1 - session.num_free_pages == num_prompt_pages + NUM_SAMPLES * num_tail_pages
        assert session.num_streams == NUM_SAMPLES


def test_samples_outlive_their_planner_and_a_lack_of_pages(own_planner: PlannerProcess, folder: Path) -> None:
    """Samples that are put back, alone or all at once, are computed again one by one and stay the same."""
    spec = _build_spec(5, NUM_SAMPLES, ((*PROMPT[:20], 7, 8, 9),))
    with run_engine(own_planner, folder, "undisturbed", page_size=PAGE_SIZE, num_pages=200) as running:
        expected = _sample(running.engine, spec)
    with run_engine(own_planner, folder, "short", page_size=PAGE_SIZE, num_pages=48, max_step_tokens=32) as running:
        assert _sample(running.engine, spec) == expected
        preemptions = running.registry.get_sample_value("ringplan_preemptions_total")
        assert preemptions is not None
        assert preemptions > 0
        answers = Answers(NUM_SAMPLES)
        running.engine.submit_samples(spec, answers.take)
        answers.wait_for_events(6)
        own_planner.kill()
        own_planner.start()
        answers.wait()
        assert [answers.token_ids[number] for number in range(NUM_SAMPLES)] == expected
        assert running.registry.get_sample_value("ringplan_planner_lost_total") == 1
        wait_until_all_pages_are_free(running)
