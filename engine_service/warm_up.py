"""Runs a model once before it serves: what is slow the first time is then done, and the first caller does not wait."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from engine_service.cuda_graphs import list_batch_sizes
from engine_service.errors import InvalidRequestError
from engine_service.labels import MAIN_LABEL
from engine_service.model_runner import ModelRunner
from engine_service.request import ChatMessage
from engine_service.sampling import Sampler, SamplingState
from engine_service.sampling_params import SamplingParams
from planner_service.client import ARRAY_NAMES, ArraysExtent, Plan, PlanArrays, PlanSource

_PREFILL_TOKENS = 64
_ALIGNMENT_BYTES = 64  # as in the planner's buffer sets
_SETTINGS = (SamplingParams(), SamplingParams(temperature=1.0, top_k=40, top_p=0.9, seed=0))


def warm_up(runner: ModelRunner, max_step_tokens: int) -> None:
    """Runs a prefill, a few decode steps, the sampler and the tokenizer. Only the sink page is written.

    Args:
        runner: the model.
        max_step_tokens: tokens of a step at most.
    """
    loaded = runner.loaded
    loaded.tokenizer.encode("Hello")
    if loaded.tokenizer.has_chat_template:
        # A template that wants more than a question is the callers' affair.
        with suppress(InvalidRequestError):
            loaded.tokenizer.encode_chat([ChatMessage("user", "Hello")])
    for spans in ((min(_PREFILL_TOKENS, max_step_tokens),), (1, 1), (1,), (1,)):
        token_ids = torch.zeros(sum(spans), dtype=torch.int64)
        logits = runner.forward({MAIN_LABEL: token_ids}, build_padding_plan(spans, runner.page_size))[MAIN_LABEL]
        for params in _SETTINGS:
            Sampler().sample(logits[:1], [SamplingState(params, (), vocab_size=loaded.vocab_size)])


def run_largest_step(runner: ModelRunner, *, max_step_tokens: int, max_running_requests: int) -> None:
    """Runs the step that takes the most memory, sampling included. Only the sink page is written.

    Args:
        runner: the model.
        max_step_tokens: tokens of a step at most.
        max_running_requests: requests in a step at most, and no more than its tokens.
    """
    spans = (max_step_tokens - max_running_requests + 1, *(1,) * (max_running_requests - 1))
    token_ids = torch.zeros(max_step_tokens, dtype=torch.int64)
    logits = runner.forward({MAIN_LABEL: token_ids}, build_padding_plan(spans, runner.page_size))[MAIN_LABEL]
    states = [SamplingState(_SETTINGS[-1], (), vocab_size=runner.loaded.vocab_size) for _ in spans]
    Sampler().sample(logits, states)


def run_decode_steps(runner: ModelRunner, max_running_requests: int) -> None:
    """Runs a decode step of every size that batches are padded to. Only the sink page is written.

    Args:
        runner: the model.
        max_running_requests: requests in a step at most.
    """
    for num_rows in list_batch_sizes(max_running_requests):
        token_ids = torch.zeros(num_rows, dtype=torch.int64)
        runner.forward({MAIN_LABEL: token_ids}, build_padding_plan((1,) * num_rows, runner.page_size))


def build_padding_plan(spans: Sequence[int], page_size: int) -> Plan:
    """Returns the plan of a step of padding rows alone, as the planner would make it; it stands in no ring.

    Args:
        spans: the span of each row, 1 or more.
        page_size: tokens a page holds.
    """
    lengths = np.array(spans, dtype=np.int32)
    num_pages = -(-lengths // page_size)
    positions = np.concatenate([np.arange(span, dtype=np.int32) for span in spans])
    columns = {
        "qo_indptr": _sum_up(lengths),
        "paged_kv_indptr": _sum_up(num_pages),
        "paged_kv_indices": np.zeros(int(num_pages.sum()), dtype=np.int32),
        "paged_kv_last_page_len": (lengths - 1) % page_size + 1,
        "kv_lens": lengths,
        "slot_mapping": positions % page_size,
        "positions": positions,
    }
    ends = np.cumsum([-(-columns[name].nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for name in ARRAY_NAMES])
    offsets = (0, *ends[:-1].tolist())
    run = np.zeros(int(ends[-1]), dtype=np.uint8)
    views = {}
    for name, offset in zip(ARRAY_NAMES, offsets, strict=True):
        views[name] = run[offset : offset + columns[name].nbytes].view(np.int32)
        views[name][:] = columns[name]
    arrays = PlanArrays(
        name=MAIN_LABEL,
        rows=(None,) * len(spans),
        extent=ArraysExtent(MAIN_LABEL, len(spans), len(positions), int(num_pages.sum()), offsets),
        **views,
    )
    no_copies = np.zeros((0, 2), dtype=np.int32)
    return Plan(
        step_id=0,
        source=PlanSource.FULL,
        labels={MAIN_LABEL: arrays},
        page_copies_before=no_copies,
        page_copies_after=no_copies,
        region_id=0,
        region_buffer=run,
        set_offset=0,
        num_bytes=run.nbytes,
    )


def _sum_up(counts: np.ndarray[tuple[int], np.dtype[np.int32]]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(counts, dtype=np.int32)])
