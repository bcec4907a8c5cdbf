"""Gathers the log-probabilities of prompts, chunk by chunk as they are computed."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine_service.logprobs import build_logprobs
from engine_service.request import Request
from engine_service.scheduled_row import ScheduledRow
from engine_service.streams import find_start
from planner_service.client import Plan


class PromptPart(NamedTuple):
    """Tokens of a prompt whose logits are wanted.

    Args:
        request: whose prompt.
        plan_label: the plan label that computes them.
        places: where they stand among its tokens.
        next_token_ids: the prompt's token after each.
    """

    request: Request
    plan_label: str
    places: range
    next_token_ids: Sequence[int]


def find_prompt_parts(rows: Sequence[ScheduledRow], plan: Plan) -> list[PromptPart]:
    """Returns the parts of prompts that a step computes and whose log-probabilities are asked for and not yet known.

    Args:
        rows: the step's rows.
        plan: its plan.
    """
    return [part for row in rows if (part := _try_find_part(row, plan)) is not None]


def add_prompt_logprobs(parts: Sequence[PromptPart], logits: torch.Tensor) -> None:
    """Notes the log-probabilities of parts of prompts in their requests.

    Args:
        parts: the parts.
        logits: what follows each of their tokens, float32 [tokens of all parts, vocab_size].
    """
    start = 0
    for part in parts:
        request, num_tokens = part.request, len(part.places)
        num_top = [request.spec.num_prompt_logprobs or 0] * num_tokens
        request.prompt_logprobs += build_logprobs(logits[start : start + num_tokens], part.next_token_ids, num_top)
        start += num_tokens


def _try_find_part(row: ScheduledRow, plan: Plan) -> PromptPart | None:
    request = row.request
    if request.spec.num_prompt_logprobs is None:
        return None
    # A prompt that is computed again, after a preemption, has told of its first tokens already.
    num_known = len(request.prompt_logprobs)
    start = find_start(request.streams[0], row.forks)
    stop = min(start + row.num_tokens, request.num_prompt_tokens - 1)
    first = max(start, num_known)
    if first >= stop:
        return None
    assert first == num_known, "no token of a prompt that is to be told of comes from elsewhere"
    key = (request.arrival, request.streams[0].label)
    name, arrays = next((name, arrays) for name, arrays in plan.labels.items() if key in arrays.rows)
    offset = int(arrays.qo_indptr[arrays.rows.index(key)]) - start
    next_token_ids = request.spec.prompt_token_ids[first + 1 : stop + 1]
    return PromptPart(request, name, range(first + offset, stop + offset), next_token_ids)
