"""Runs a model once before it serves: what is slow the first time is then done, and the first caller does not wait."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from engine_service.errors import InvalidRequestError
from engine_service.labels import MAIN_LABEL
from engine_service.model_runner import ModelRunner
from engine_service.request import ChatMessage
from engine_service.sampling import Sampler, SamplingState
from engine_service.sampling_params import SamplingParams
from planner_service.client import ArraysExtent, Plan, PlanArrays, PlanSource

_PREFILL_TOKENS = 64
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


def build_padding_plan(spans: Sequence[int], page_size: int) -> Plan:
    """Returns the plan of a step of padding rows alone, as the planner would make it.

    Args:
        spans: the span of each row, 1 or more.
        page_size: tokens a page holds.
    """
    lengths = np.array(spans, dtype=np.int32)
    num_pages = -(-lengths // page_size)
    positions = np.concatenate([np.arange(span, dtype=np.int32) for span in spans])
    arrays = PlanArrays(
        name=MAIN_LABEL,
        rows=(None,) * len(spans),
        qo_indptr=_sum_up(lengths),
        paged_kv_indptr=_sum_up(num_pages),
        paged_kv_indices=np.zeros(int(num_pages.sum()), dtype=np.int32),
        paged_kv_last_page_len=(lengths - 1) % page_size + 1,
        kv_lens=lengths,
        slot_mapping=positions % page_size,
        positions=positions,
        extent=ArraysExtent(MAIN_LABEL, len(spans), len(positions), int(num_pages.sum()), (0,) * 7),
    )
    no_copies = np.zeros((0, 2), dtype=np.int32)
    return Plan(
        step_id=0,
        source=PlanSource.FULL,
        labels={MAIN_LABEL: arrays},
        page_copies_before=no_copies,
        page_copies_after=no_copies,
        region_id=0,
        region_buffer=np.zeros(0, dtype=np.uint8),
        set_offset=0,
        num_bytes=0,
    )


def _sum_up(counts: np.ndarray[tuple[int], np.dtype[np.int32]]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(counts, dtype=np.int32)])
