"""Engines on the GPU: tokens are those of transformers, whatever computes attention and however late copies are."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from engine_service.request import GenerationSpec, GuidanceContext, StoppingParams
from tests.engine_runs import Answers, RunningEngine, run_engine
from tests.engine_service.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.gpu.decided_tokens import DecidedAnswer, generate_decided
from tests.gpu.side import Side
from tests.planner_process import PlannerProcess

# FlashInfer compiles its kernels when they are first used.
pytestmark = pytest.mark.timeout(200)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NUM_TOKENS = 24
LENGTHS = (5, 1, 17, 40, 3, 64, 31, 16, 33, 100, 2, 70)
# Prompts in chunks, beside requests that decode already; or all at once, and decode steps alone after them.
CHUNKED = {"page_size": 16, "num_pages": 801, "max_running_requests": 16, "max_step_tokens": 64}
AT_ONCE = {"page_size": 16, "num_pages": 801, "max_running_requests": 128, "max_step_tokens": 8_192}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with heads as FlashInfer takes them."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return save_tiny_model(config, tmp_path_factory.mktemp("model"))


def draw_prompts(seed: int, lengths: Sequence[int] = LENGTHS) -> list[tuple[int, ...]]:
    """Returns random prompts."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()) for length in lengths]


def answer_all(
    running: RunningEngine, asked: Sequence[tuple[tuple[int, ...], int]], contexts: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[int]]:
    """Returns the engine's answers.

    Args:
        running: the engine.
        asked: prompts, and how many tokens are to follow each.
        contexts: for each prompt the contexts that it is guided away from.
    """
    answers = Answers(len(asked))
    for number, ((prompt, num_tokens), some) in enumerate(zip(asked, contexts, strict=True)):
        spec = GenerationSpec(
            str(number),
            prompt,
            stopping=StoppingParams(max_tokens=num_tokens, ignore_eos=True),
            guidance=tuple(GuidanceContext(context, 1.5) for context in some),
        )
        running.engine.submit(spec, lambda event, number=number: answers.take(number, event))  # type: ignore[misc]  # mypy cannot infer a default.
    answers.wait()
    assert running.engine.wait_until_finished(20)
    return [answers.token_ids[number] for number in range(len(asked))]


def read_metric(running: RunningEngine, name: str) -> float:
    """Returns a sample's value."""
    value = running.registry.get_sample_value(name)
    assert value is not None
    return value


_decided: dict[tuple[str, torch.device], list[DecidedAnswer]] = {}


@pytest.mark.parametrize("is_late", [False, True], ids=["prompt", "late"])
@pytest.mark.parametrize(("backend", "cuda_graphs"), [("torch", False), ("flashinfer", False), ("flashinfer", True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_those_of_transformers(
    side: Side,
    planner: PlannerProcess,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    backend: str,
    cuda_graphs: bool,
    is_late: bool,
) -> None:
    """In half precision, wherever rounding cannot choose; a ring of 2, batches that come and go."""
    key = (dtype, side.device)
    if key not in _decided:
        _decided[key] = generate_decided(folder, DTYPES[dtype], side.device, draw_prompts(seed=1), NUM_TOKENS)
    expected = _decided[key]
    asked = [(part.prompt, len(part.token_ids)) for part in expected]
    settings = (AT_ONCE if cuda_graphs else CHUNKED) | side.prepare_engines(monkeypatch, is_late=is_late)
    name = f"{side.device.type}-{dtype}-{backend}-{cuda_graphs}-{is_late}"
    with run_engine(
        planner,
        folder,
        name,
        dtype=dtype,
        attention_backend=backend,
        cuda_graphs=cuda_graphs,
        ring_depth=2,
        cache_mode="verify",
        **settings,
    ) as running:
        found = answer_all(running, asked, [()] * len(asked))
        assert running.find_session().num_cache_mismatches == 0
        assert (read_metric(running, "ringplan_cuda_graph_replays_total") > 0) == cuda_graphs
        if side.is_gpu:
            assert read_metric(running, "ringplan_region_pinned") == 1
    assert found == [part.token_ids for part in expected]
    # Enough is decided to show something, and enough of it by decode steps.
    assert sum(num_tokens for _, num_tokens in asked) > 80
    assert sum(num_tokens - 1 for _, num_tokens in asked) > 30


@pytest.mark.parametrize("guidance_plan", ["separate", "combined"])
def test_guided_tokens_are_the_same_with_graphs_and_without(
    side: Side, planner: PlannerProcess, folder: Path, monkeypatch: pytest.MonkeyPatch, guidance_plan: str
) -> None:
    """Three labels, a ring of 2, late copies: a captured step gives what an eager one gives."""
    asked = [(prompt, NUM_TOKENS) for prompt in draw_prompts(seed=2, lengths=(20, 9, 33))]
    first, second, third = draw_prompts(seed=3, lengths=(4, 30, 12))
    contexts = [(first, second), (third,), ()]
    settings = AT_ONCE | side.prepare_engines(monkeypatch, is_late=True)
    found = []
    for cuda_graphs in (True, False):
        with run_engine(
            planner,
            folder,
            f"{side.device.type}-guided-{guidance_plan}-{cuda_graphs}",
            dtype="float16",
            attention_backend="flashinfer",
            cuda_graphs=cuda_graphs,
            guidance_plan=guidance_plan,
            ring_depth=2,
            **settings,
        ) as running:
            found.append(answer_all(running, asked, contexts))
            replays = read_metric(running, "ringplan_cuda_graph_replays_total")
            assert (replays > NUM_TOKENS // 2) == cuda_graphs
    num_equal = sum(
        len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True))))
        for one, other in zip(*found, strict=True)
    )
    # On a GPU a captured batch may split long rows otherwise, and add up in another order.
    assert num_equal == len(asked) * NUM_TOKENS if not side.is_gpu else num_equal > len(asked) * NUM_TOKENS // 2
