"""`model_runner.py`: greedy tokens equal those of transformers' own generate on the same weights."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_service.model_loading import LoadedModel, load_model
from engine_service.model_runner import ModelRunner
from planner_service.client import Plan
from tests.engine_service.churn import ChurnRequest, run_churn
from tests.engine_service.hand_plans import PAD, HandPlanner, build_plan
from tests.engine_service.tiny_models import ARCHITECTURES, VOCAB_SIZE, save_tiny_checkpoint

# Prompt length, tokens to generate, step at which it joins: 8 that come and go while others run.
CHURN = ((5, 20, 0), (1, 12, 0), (17, 4, 1), (40, 15, 3), (3, 25, 4), (8, 2, 9), (31, 10, 12), (64, 6, 14))


def generate_reference(folder: Path, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]) -> list[list[int]]:
    """What transformers generates greedily, prompt by prompt; it ends at the end-of-sequence token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    answers = []
    for prompt, count in zip(prompts, num_tokens, strict=True):
        input_ids = torch.tensor([list(prompt)])
        output = model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def build_requests(seed: int = 1) -> list[ChurnRequest]:
    """Eight requests with random prompts."""
    generator = torch.Generator().manual_seed(seed)
    return [
        ChurnRequest(torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist(), count, joins_at)
        for length, count, joins_at in CHURN
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each architecture."""
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny_checkpoint(name, root / name) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def llama(folders: dict[str, Path]) -> LoadedModel:
    """The tiny Llama, loaded."""
    return load_model(folders["llama"])


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """For each architecture, what transformers answers to the eight requests."""
    requests = build_requests()
    prompts, counts = [one.prompt for one in requests], [one.num_tokens for one in requests]
    return {name: generate_reference(folder, prompts, counts) for name, folder in folders.items()}


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_transformers_while_requests_join_and_leave(
    folders: dict[str, Path], reference: dict[str, list[list[int]]], architecture: str, page_size: int
) -> None:
    """Every request's tokens are those of `generate`, whoever shares its batch and whatever the page size."""
    runner = ModelRunner(load_model(folders[architecture]), num_pages=1 + 400 // page_size, page_size=page_size)
    requests = build_requests()
    run_churn(runner, requests, chunk=7, num_padding=2)
    for request, expected in zip(requests, reference[architecture], strict=True):
        assert request.generated[: len(expected)] == expected
    # A test of tokens that are all the same would show little.
    assert len(set(itertools.chain(*reference[architecture]))) > 20


@pytest.mark.parametrize("chunk", [1, 5, 33, 1000])
def test_tokens_do_not_depend_on_the_chunks_a_prompt_goes_in_by(
    llama: LoadedModel, reference: dict[str, list[list[int]]], chunk: int
) -> None:
    """A prompt that goes in token by token, by chunks or at once gets the same answer."""
    requests = build_requests()
    run_churn(ModelRunner(llama, num_pages=120, page_size=4), requests, chunk=chunk)
    for request, expected in zip(requests, reference["llama"], strict=True):
        assert request.generated[: len(expected)] == expected


def test_nan_in_the_sink_page_and_in_unused_slots_reaches_no_token(
    llama: LoadedModel, reference: dict[str, list[list[int]]]
) -> None:
    """Whatever stands in the sink page or in slots that a plan does not name takes no part in any sum."""
    runner = ModelRunner(llama, num_pages=120, page_size=4)
    runner.cache.pages.fill_(torch.nan)

    def poison_sink(_plan: Plan) -> None:
        runner.cache.pages[:, 0] = torch.nan

    requests = build_requests()
    run_churn(runner, requests, chunk=6, num_padding=3, on_step=poison_sink)
    for request, expected in zip(requests, reference["llama"], strict=True):
        assert request.generated[: len(expected)] == expected


def test_each_plan_label_is_attended_by_itself(llama: LoadedModel) -> None:
    """Logits of rows in two plan labels equal those of the same rows planned alone."""
    first, second = [5, 6, 7, 8, 9], [300, 20, 31]
    alone = []
    for tokens in (first, second):
        runner = ModelRunner(llama, num_pages=20, page_size=4)
        plan = HandPlanner(page_size=4, num_pages=20).plan({"main": [(0, len(tokens))]})
        alone.append(runner.forward({"main": torch.tensor(tokens)}, plan)["main"])
    runner = ModelRunner(llama, num_pages=20, page_size=4)
    plan = HandPlanner(page_size=4, num_pages=20).plan({"main": [(0, 5), (PAD, 1)], "cfg_text": [(1, 3)]})
    logits = runner.forward({"main": torch.tensor([*first, 0]), "cfg_text": torch.tensor(second)}, plan)
    assert logits["main"].shape == (2, VOCAB_SIZE)
    torch.testing.assert_close(logits["main"][:1], alone[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits["cfg_text"], alone[1], rtol=1e-4, atol=1e-4)


def test_page_copies_come_before_and_after_the_forward(llama: LoadedModel) -> None:
    """A stream that was forked inside a page goes on exactly as its source would."""
    tokens, more = [9, 8, 7, 6, 5, 4], [3]
    runner, planner = ModelRunner(llama, num_pages=20, page_size=4), HandPlanner(page_size=4, num_pages=20)
    runner.forward({"main": torch.tensor(tokens)}, planner.plan({"main": [(0, 6)]}))
    plan = planner.plan({"main": [(1, 1), (0, 1)]}, forks_before=[(0, 1)])
    assert len(plan.page_copies_before) == 1
    logits = runner.forward({"main": torch.tensor(more * 2)}, plan)["main"]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)

    empty = {"qo_indptr": [0], "paged_kv_indptr": [0], "paged_kv_indices": [], "paged_kv_last_page_len": []}
    arrays = empty | {"kv_lens": [], "slot_mapping": [], "positions": []}
    nothing = {"main": torch.zeros(0, dtype=torch.int64)}
    runner.forward(nothing, build_plan({"main": arrays}, page_copies_after=[(plan.page_copies_before[0][0], 19)]))
    torch.testing.assert_close(runner.cache.pages[:, 19], runner.cache.pages[:, plan.page_copies_before[0][0]])


def test_rows_without_query_tokens_are_allowed(llama: LoadedModel) -> None:
    """A row with span 0 has a row of logits, and changes nothing for the others."""
    runner, planner = ModelRunner(llama, num_pages=20, page_size=4), HandPlanner(page_size=4, num_pages=20)
    plain = runner.forward({"main": torch.tensor([4, 5])}, planner.plan({"main": [(0, 2)]}))["main"]
    runner, planner = ModelRunner(llama, num_pages=20, page_size=4), HandPlanner(page_size=4, num_pages=20)
    logits = runner.forward({"main": torch.tensor([4, 5])}, planner.plan({"main": [(1, 0), (0, 2), (2, 0)]}))["main"]
    assert logits.shape == (3, VOCAB_SIZE)
    torch.testing.assert_close(logits[1], plain[0])


def test_tokens_that_are_not_those_of_the_plan_are_refused(llama: LoadedModel) -> None:
    """Too few tokens, or tokens for another plan label, never reach the model."""
    runner, planner = ModelRunner(llama, num_pages=20, page_size=4), HandPlanner(page_size=4, num_pages=20)
    plan = planner.plan({"main": [(0, 2)]})
    with pytest.raises(ValueError, match="tokens for 'main'"):
        runner.forward({"main": torch.tensor([4])}, plan)
    with pytest.raises(ValueError, match="plan labels"):
        runner.forward({"other": torch.tensor([4, 5])}, plan)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_logits_are_near_those_of_float32(folders: dict[str, Path], dtype: str) -> None:
    """Prefill and decode in half precision differ from float32 by rounding only."""
    logits = {}
    for one in ("float32", dtype):
        loaded = load_model(folders["llama"], dtype=one)
        runner, planner = ModelRunner(loaded, num_pages=20, page_size=4), HandPlanner(page_size=4, num_pages=20)
        runner.forward({"main": torch.arange(1, 21)}, planner.plan({"main": [(0, 20)]}))
        logits[one] = runner.forward({"main": torch.tensor([7])}, planner.plan({"main": [(0, 1)]}))["main"]
        assert logits[one].dtype == torch.float32
    similarity = torch.cosine_similarity(logits["float32"], logits[dtype])
    assert similarity.item() > 0.99
