"""`prompt_logprobs.py`: every token of a prompt but the first is told of once, however the prompt is computed."""

from collections.abc import Sequence

import pytest
import torch

from engine_service.labels import MAIN_LABEL
from engine_service.prompt_logprobs import PromptPart, add_prompt_logprobs, find_prompt_parts
from engine_service.request import GenerationSpec, Request
from engine_service.sampling_params import SampledToken
from engine_service.scheduled_row import ScheduledRow
from planner_service.client import Plan
from tests.engine_service.hand_plans import build_plan, build_scattered_arrays

PROMPT = tuple(range(10, 22))
VOCAB_SIZE = 30
# A table in place of a model: what follows a token depends on it alone.
TABLE = torch.randn((VOCAB_SIZE, VOCAB_SIZE), generator=torch.Generator().manual_seed(2))


def make_request(arrival: int = 1, num_prompt_logprobs: int | None = 2) -> Request:
    """A request that asks for the log-probabilities of its prompt."""
    return Request(GenerationSpec("r", PROMPT, num_prompt_logprobs=num_prompt_logprobs), arrival, 5)


def plan_rows(rows: Sequence[ScheduledRow]) -> Plan:
    """The rows' plan, with a padding row before them."""
    spans = [(row.request.num_computed_tokens, row.num_tokens) for row in rows]
    keys = [None, *[(row.request.arrival, MAIN_LABEL) for row in rows]]
    arrays = build_scattered_arrays([None, *spans], page_size=4)
    return build_plan({"first": build_scattered_arrays([None], 4), "all": arrays}, rows={"all": keys})


def run_step(rows: Sequence[ScheduledRow]) -> list[PromptPart]:
    """Runs a step on the table."""
    plan = plan_rows(rows)
    tokens = [0, *[token_id for row in rows for token_id in row.token_ids]]
    parts = find_prompt_parts(rows, plan)
    assert all(part.plan_label == "all" for part in parts)
    add_prompt_logprobs(parts, TABLE[[tokens[place] for part in parts for place in part.places]])
    for row in rows:
        row.complete()
    return parts


def check(request: Request) -> None:
    """Compares with the table's own log-softmax."""
    expected = torch.log_softmax(TABLE, dim=-1)
    assert [token.token_id for token in request.prompt_logprobs] == list(PROMPT[1:])
    for before, token in zip(PROMPT, request.prompt_logprobs, strict=False):
        assert token.logprob == pytest.approx(expected[before, token.token_id].item(), abs=1e-6)
        assert [top.token_id for top in token.top_logprobs] == expected[before].topk(2).indices.tolist()


@pytest.mark.parametrize("chunks", [[12], [1] * 12, [11, 1], [5, 4, 3], [2, 10]])
def test_chunks_add_up_to_the_prompt(chunks: list[int]) -> None:
    """Wherever it is cut; the last token's logits are for the answer."""
    request = make_request()
    for num_tokens in chunks:
        run_step([ScheduledRow(request, num_tokens)])
    check(request)


@pytest.mark.parametrize("num_tokens_before", [1, 5, 11, 12])
def test_what_is_computed_again_is_not_told_again(num_tokens_before: int) -> None:
    """After a preemption the prompt goes in anew, in other chunks."""
    request = make_request()
    run_step([ScheduledRow(request, num_tokens_before)])
    request.forget_computed()
    for num_tokens in (3, 4, 5):
        run_step([ScheduledRow(request, num_tokens)])
    check(request)


def test_requests_in_a_step_keep_to_themselves() -> None:
    """One that does not ask, and one that decodes, are passed over."""
    first, silent, second = make_request(1), make_request(2, None), make_request(3)
    run_step([ScheduledRow(first, 4), ScheduledRow(silent, 12), ScheduledRow(second, 12)])
    silent.token_ids.append(5)
    second.token_ids.append(5)
    parts = run_step([ScheduledRow(first, 8), ScheduledRow(silent, 1), ScheduledRow(second, 1)])
    assert [part.request for part in parts] == [first]
    check(first)
    check(second)
    assert silent.prompt_logprobs == []


def test_prompt_of_one_token_has_nothing_to_tell() -> None:
    """Nothing comes before its only token."""
    request = Request(GenerationSpec("r", (3,), num_prompt_logprobs=0), 1, 5)
    assert run_step([ScheduledRow(request, 1)]) == []
    assert request.prompt_logprobs == list[SampledToken]()
