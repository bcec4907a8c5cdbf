"""What the engine is measured against: the same model without it, by transformers and as a bare loop."""

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

from engine_service.model_loading import LoadedModel

# What transformers takes for a model by itself.
_TRANSFORMERS_ATTENTION = "sdpa"
_CB_PAGE_SIZE = 16
_CB_STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and how many tokens are to follow it.

    Args:
        prompt_token_ids: the prompt.
        num_new_tokens: tokens to choose, greedily; none of them ends the answer.
    """

    prompt_token_ids: tuple[int, ...]
    num_new_tokens: int


Answers = list[list[int]]


@contextmanager
def attending_by(loaded: LoadedModel, name: str = _TRANSFORMERS_ATTENTION) -> Iterator[None]:
    """Runs the model with another attention of transformers' than the engine's.

    Args:
        loaded: the model.
        name: transformers' name of the attention.
    """
    model: Any = loaded.model
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def generate_in_batches(loaded: LoadedModel, tasks: Sequence[Task], batch_size: int) -> tuple[Answers, float]:
    """Runs transformers' `generate`: batch after batch, padded on the left, each as long as its longest answer.

    Args:
        loaded: the model; transformers' own attention is used.
        tasks: what to run, in order.
        batch_size: how many of them a batch has.

    Returns:
        The answers, cut to what was asked for, and the seconds it took.
    """
    answers: Answers = []
    model: Any = loaded.model
    with attending_by(loaded), torch.inference_mode():
        started = time.perf_counter()
        for first in range(0, len(tasks), batch_size):
            batch = tasks[first : first + batch_size]
            token_ids, mask = _pad_left(batch)
            output = model.generate(
                token_ids, attention_mask=mask, generation_config=_build_config(max(t.num_new_tokens for t in batch))
            )
            new = output[:, token_ids.shape[1] :].tolist()
            answers += [row[: task.num_new_tokens] for row, task in zip(new, batch, strict=True)]
        seconds = time.perf_counter() - started
    return answers, seconds


def generate_continuously(loaded: LoadedModel, tasks: Sequence[Task], max_requests: int) -> tuple[Answers, float]:
    """Runs transformers' continuous batching over a pool that has room for all requests that run at once.

    Args:
        loaded: the model; transformers' own paged attention is used.
        tasks: what to run; all are there from the start.
        max_requests: how many of them run at once.

    Returns:
        The answers, and the seconds from the first request handed in to the last answer.
    """
    model: Any = loaded.model
    longest = max(len(task.prompt_token_ids) + task.num_new_tokens for task in tasks)
    options: Any = ContinuousBatchingConfig(
        page_size=_CB_PAGE_SIZE,
        num_blocks=max_requests * (-(-longest // _CB_PAGE_SIZE) + 1),
        max_batch_tokens=_CB_STEP_TOKENS,
        max_requests_per_batch=max_requests,
        allow_block_sharing=False,
    )
    config = _build_config(longest)
    answers: dict[int, list[int]] = {}
    # It warns of what is not set for a GPU.
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    # The paged attention stays set when its manager ends.
    with (
        attending_by(loaded),
        model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=options, warmup=False
        ) as manager,
    ):
        started = time.perf_counter()
        for number, task in enumerate(tasks):
            manager.add_request(list(task.prompt_token_ids), request_id=str(number), max_new_tokens=task.num_new_tokens)
        while len(answers) < len(tasks):
            result = manager.get_result(timeout=1.0)
            if result is not None and result.is_finished():
                answers[int(result.request_id)] = list(result.generated_tokens)
            elif not manager.is_running():
                raise RuntimeError("transformers' continuous batching ended before the answers were there")
        seconds = time.perf_counter() - started
    return [answers[number] for number in range(len(tasks))], seconds


def time_bare_steps(loaded: LoadedModel, num_rows: int, num_past_tokens: int, num_steps: int) -> list[float]:
    """Runs decode steps of the bare model: all rows equally long, keys and values dense, the likeliest token taken.

    Args:
        loaded: the model; transformers' own attention is used.
        num_rows: rows of the batch.
        num_past_tokens: tokens each row has before the first step.
        num_steps: how many steps are timed.

    Returns:
        The seconds of each step.
    """
    model: Any = loaded.model
    times = []
    with attending_by(loaded), torch.inference_mode(), warnings.catch_warnings():
        # Of a keyword that has another name in newer versions.
        warnings.simplefilter("ignore", FutureWarning)
        cache = DynamicCache(config=model.config)
        tokens = torch.randint(
            loaded.vocab_size, (num_rows, num_past_tokens), generator=torch.Generator().manual_seed(0)
        )
        output = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        for _ in range(num_steps):
            started = time.perf_counter()
            output = model(
                input_ids=output.logits[:, -1].argmax(-1, keepdim=True), past_key_values=cache, use_cache=True
            )
            times.append(time.perf_counter() - started)
    return times


def _pad_left(tasks: Sequence[Task]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(task.prompt_token_ids) for task in tasks)
    token_ids = torch.zeros((len(tasks), longest), dtype=torch.int64)
    mask = torch.zeros_like(token_ids)
    for row, task in enumerate(tasks):
        num_tokens = len(task.prompt_token_ids)
        token_ids[row, longest - num_tokens :] = torch.tensor(task.prompt_token_ids)
        mask[row, longest - num_tokens :] = 1
    return token_ids, mask


def _build_config(num_new_tokens: int) -> GenerationConfig:
    # Without an end-of-sequence token every answer has its full length.
    return GenerationConfig(  # type: ignore[no-untyped-call]  # It has no annotations.
        do_sample=False, max_new_tokens=num_new_tokens, eos_token_id=None, pad_token_id=0
    )
