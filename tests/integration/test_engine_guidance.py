"""Guided generation on a real planner: greedy tokens are those of transformers, and of a dense reference."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine_service.engine import Engine
from engine_service.request import GenerationSpec, GuidanceContext, StoppingParams
from tests.engine_runs import Answers, run_engine, wait_until_all_pages_are_free
from tests.engine_service.tiny_models import VOCAB_SIZE, save_tiny_checkpoint
from tests.planner_process import PlannerProcess
from tests.reference.dense_guidance import generate_guided

pytestmark = pytest.mark.usefixtures("nan_in_new_memory")

ARCHITECTURES = ("llama", "qwen3")
NUM_TOKENS = 16
EOS_TOKEN_ID = 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each architecture."""
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny_checkpoint(name, root / name) for name in ARCHITECTURES}


def _draw(num_tokens: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(1, VOCAB_SIZE, (num_tokens,), generator=generator).tolist())


PROMPT = _draw(37, seed=1)
# Prompt, contexts and their scales: none, one and two contexts; some begin as the prompt does, one is its beginning.
ASKED: tuple[tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[float, ...]], ...] = (
    (PROMPT, ((*PROMPT[:19], *_draw(9, seed=2)),), (1.5,)),
    (_draw(5, seed=3), (), ()),
    (_draw(11, seed=4), (_draw(45, seed=5),), (3.0,)),
    (PROMPT, (PROMPT[:24], (*PROMPT[:30], *_draw(3, seed=6))), (2.5, 1.25)),
    (_draw(60, seed=7), (_draw(1, seed=8), _draw(17, seed=9)), (1.5, 2.0)),
    (PROMPT, (), ()),
    (_draw(8, seed=10), (_draw(8, seed=11),), (0.0,)),
)


def _build_specs() -> list[GenerationSpec]:
    return [
        GenerationSpec(
            str(number),
            prompt,
            stopping=StoppingParams(max_tokens=NUM_TOKENS),
            guidance=tuple(GuidanceContext(context, scale) for context, scale in zip(contexts, scales, strict=True)),
        )
        for number, (prompt, contexts, scales) in enumerate(ASKED)
    ]


def _generate_with_transformers(
    model: PreTrainedModel, prompt: Sequence[int], context: Sequence[int], scale: float
) -> list[int]:
    tokens = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
        guidance_scale=scale,
        negative_prompt_ids=torch.tensor([list(context)]),
        negative_prompt_attention_mask=torch.ones((1, len(context)), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=EOS_TOKEN_ID,
    )
    answer: list[int] = tokens[0, len(prompt) :].tolist()
    return answer


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """For each architecture the right answers: by transformers for one context, by the dense reference for all."""
    answers = {}
    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        answers[name] = [
            generate_guided(model, prompt, contexts, scales, NUM_TOKENS, EOS_TOKEN_ID)
            for prompt, contexts, scales in ASKED
        ]
        for (prompt, contexts, scales), answer in zip(ASKED, answers[name], strict=True):
            if len(contexts) == 1:
                assert answer == _generate_with_transformers(model, prompt, contexts[0], scales[0])
    return answers


def _answer_all(engine: Engine, specs: Sequence[GenerationSpec]) -> list[list[int]]:
    answers = Answers(len(specs))
    for number, spec in enumerate(specs):
        engine.submit(spec, lambda event, number=number: answers.take(number, event))  # type: ignore[misc]  # mypy cannot infer a default.
    answers.wait()
    return [answers.token_ids[number] for number in range(len(specs))]


@pytest.mark.parametrize("guidance_plan", ["separate", "combined"])
@pytest.mark.parametrize(("page_size", "cache_mode", "plan_ahead"), [(1, "off", 0), (4, "verify", 8), (16, "on", 2)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_guided_tokens_are_right_however_contexts_are_planned(
    planner_process: PlannerProcess,
    folders: dict[str, Path],
    expected: dict[str, list[list[int]]],
    architecture: str,
    page_size: int,
    cache_mode: str,
    plan_ahead: int,
    guidance_plan: str,
) -> None:
    """Plain requests and those with one or two contexts share batches; every token is right, every page comes back."""
    with run_engine(
        planner_process,
        folders[architecture],
        f"guided-{architecture}-{page_size}-{guidance_plan}",
        page_size=page_size,
        cache_mode=cache_mode,
        plan_ahead=plan_ahead,
        guidance_plan=guidance_plan,
        num_pages=1 + 800 // page_size,
        max_running_requests=14,
        max_step_tokens=40,
    ) as running:
        assert _answer_all(running.engine, _build_specs()) == expected[architecture]
        assert running.engine.wait_until_finished(10)
        wait_until_all_pages_are_free(running)
        assert running.find_session().num_cache_mismatches == 0


def test_guided_tokens_are_the_same_when_pages_run_out(
    planner_process: PlannerProcess, folders: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    """A guided request that is put back is computed again with all its contexts."""
    with run_engine(
        planner_process, folders["llama"], "guided-short-of-pages", page_size=4, num_pages=38, max_step_tokens=32
    ) as running:
        assert _answer_all(running.engine, _build_specs()) == expected["llama"]
        preemptions = running.registry.get_sample_value("ringplan_preemptions_total")
        assert preemptions is not None
        assert preemptions > 0
        wait_until_all_pages_are_free(running)
